"""The value types of a tool schema, after normalisation (`jaxkv.grammar.schema`)."""

from dataclasses import dataclass

from jaxkv.grammar.numeric_range import UNBOUNDED, Bounds


@dataclass(frozen=True)
class Any:
    """Any JSON value."""


@dataclass(frozen=True)
class Null:
    """null."""


@dataclass(frozen=True)
class Boolean:
    """true or false."""


@dataclass(frozen=True)
class String:
    """Any JSON string."""


@dataclass(frozen=True)
class Integer:
    """An integer numeral, no fraction or exponent."""

    bounds: Bounds = UNBOUNDED


@dataclass(frozen=True)
class Number:
    """A number; integers are numbers."""

    bounds: Bounds = UNBOUNDED


@dataclass(frozen=True)
class Enum:
    """One of fixed values, each as JSON text."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """An array of one item type; `maximum` None is unbounded."""

    items: "Node"
    minimum: int = 0
    maximum: int | None = None


@dataclass(frozen=True)
class Property:
    """A declared property of an object."""

    name: str
    value: "Node"
    required: bool


@dataclass(frozen=True)
class Object:
    """An object of exactly the declared properties."""

    properties: tuple[Property, ...]


@dataclass(frozen=True)
class Map:
    """An object of free keys and one value type."""

    values: "Node"


@dataclass(frozen=True)
class Union:
    """A value of any of several types."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Ref:
    """A reference to `Tool.definitions[key]`, possibly recursive."""

    key: str


Node = Any | Null | Boolean | String | Integer | Number | Enum | Array | Object | Map | Union | Ref
