"""A builder of marked EBNF grammars in XGrammar's notation."""

from jaxkv.grammar.frontier import Marker


def literal(text: str) -> str:
    """`text` as an EBNF string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def choice(texts: list[str] | tuple[str, ...]) -> str:
    """One of fixed `texts`."""
    return " | ".join(literal(text) for text in texts)


class GrammarBuilder:
    """Collects rules; the first one added is the root.

    A marked rule is written ``name[temperature=<int>]``: XGrammar then keeps the rule (options forbid inlining) and
    lets every parser state below it carry its id. Masks are those of the unmarked grammar.
    """

    def __init__(self, *, marked: bool = True):
        self.marked = marked
        self.markers: dict[str, Marker] = {}
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str = "", marker: Marker | None = None) -> str:
        """Add rule `name`; an empty body reserves its place, to be filled by `define`."""
        if name in self._rules:
            raise AssertionError(f"rule {name} is defined twice")
        if marker is not None and self.marked:
            self.markers[name] = marker
        self._rules[name] = body
        return name

    def define(self, name: str, body: str) -> None:
        """Fill the body of a reserved rule."""
        self._rules[name] = body

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def text(self) -> str:
        """The grammar."""
        numbers = {name: i for i, name in enumerate(self.markers, 1)}
        return "\n".join(
            f"{name}[temperature={numbers[name]}] ::= {body}" if name in numbers else f"{name} ::= {body}"
            for name, body in self._rules.items()
        )
