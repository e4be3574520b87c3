"""EBNF for JSON numbers between bounds.

A context-free grammar has no arithmetic, but the decimal numerals of a range are a regular language: digits are
compared one by one from the left. Bounded numbers are written without an exponent, which loses no value that a JSON
writer produces for magnitudes between 1e-4 and 1e16.
"""

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

DIGIT = "[0-9]"


@dataclass(frozen=True)
class Bounds:
    """Inclusive or exclusive bounds of a number; None is unbounded."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_exclusive: bool = False
    high_exclusive: bool = False

    def empty(self, integer: bool) -> bool:
        """Whether no number (no integer, if `integer`) lies within the bounds."""
        if integer:
            low, high = self.integer_limits()
            return low is not None and high is not None and low > high
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_exclusive or self.high_exclusive))

    def integer_limits(self) -> tuple[int | None, int | None]:
        """The smallest and the largest integer within the bounds."""
        low = high = None
        if self.low is not None:
            low = int(self.low.to_integral_value(ROUND_CEILING))
            low += int(self.low_exclusive and low == self.low)
        if self.high is not None:
            high = int(self.high.to_integral_value(ROUND_FLOOR))
            high -= int(self.high_exclusive and high == self.high)
        return low, high

    def mirrored(self) -> "Bounds":
        """The bounds of -x."""
        return Bounds(
            None if self.high is None else -self.high,
            None if self.low is None else -self.low,
            self.high_exclusive,
            self.low_exclusive,
        )


UNBOUNDED = Bounds()


def integer_range(bounds: Bounds) -> str:
    """An EBNF expression for the integers within `bounds`, no leading zeros, no ``-0``."""
    low, high = bounds.integer_limits()
    parts = []
    if low is None or low < 0:
        first = 1 if high is None or high >= 0 else -high
        last = None if low is None else -low
        parts += [f'"-" ({_naturals(first, last)})']
    if high is None or high >= 0:
        parts.append(_naturals(0 if low is None else max(low, 0), high))
    return " | ".join(parts)


def number_range(bounds: Bounds) -> str:
    """An EBNF expression for the decimal numbers within `bounds`, without an exponent."""
    parts = []
    if bounds.high is None or bounds.high > 0 or (bounds.high == 0 and not bounds.high_exclusive):
        parts.append(_magnitudes(bounds))
    if bounds.low is None or bounds.low < 0:
        parts.append(f'"-" ({_magnitudes(bounds.mirrored())})')
    return " | ".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Numerals of the natural numbers in [low, high], as alternatives grouped by their number of digits."""
    parts = []
    length = len(str(low))
    last = len(str(high)) if high is not None else length
    for digits in range(length, last + 1):
        smallest = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        largest = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        parts.append(_same_length(str(smallest), str(largest)))
    if high is None:
        parts.append(f"[1-9] {_repeat(length)} {DIGIT}*")
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    """Digit strings between `low` and `high`, all of one length."""
    if low == high:
        return f'"{low}"'
    if not low.strip("0") and not high.strip("9"):
        return _repeat(len(low))
    if low[0] == high[0]:
        return f'"{low[0]}" ({_same_length(low[1:], high[1:])})'
    if len(low) == 1:
        return f"[{low}-{high}]"
    rest = len(low) - 1
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:].strip("0"):
        parts.append(f'"{low[0]}" ({_same_length(low[1:], "9" * rest)})')
        first += 1
    if high[1:].strip("9"):
        parts.append(f'"{high[0]}" ({_same_length("0" * rest, high[1:])})')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] {_repeat(rest)}")
    return " | ".join(parts)


def _repeat(count: int) -> str:
    return " ".join([DIGIT] * count)


def _magnitudes(bounds: Bounds) -> str:
    """Decimals x >= 0 with low <= x <= high (strict where exclusive); a negative low does not bind."""
    low, low_exclusive = bounds.low, bounds.low_exclusive
    if low is None or low < 0:
        low, low_exclusive = Decimal(0), False
    whole, fraction = _split(low)
    if bounds.high is None:
        return f"({_naturals(whole + 1, None)}) {_FRACTION} | " + _point(whole, _at_least(fraction, low_exclusive))
    top, top_fraction = _split(bounds.high)
    below = _at_most(top_fraction, bounds.high_exclusive)
    if whole == top:
        return _point(whole, _between(fraction, low_exclusive, top_fraction, bounds.high_exclusive))
    parts = [_point(whole, _at_least(fraction, low_exclusive))]
    if below:
        parts.append(_point(top, below))
    if top - whole > 1:
        parts.append(f"({_naturals(whole + 1, top - 1)}) {_FRACTION}")
    return " | ".join(parts)


_FRACTION = f'("." {DIGIT}+)?'


def _split(value: Decimal) -> tuple[int, str]:
    """Whole part and fraction digits (without trailing zeros) of a non-negative decimal."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _point(whole: int, fractions: list[str]) -> str:
    """`whole` followed by one of `fractions`; the empty fraction is written without a point."""
    return " | ".join(f'"{whole}"' if not f else f'"{whole}." {f}' for f in fractions)


def _at_least(digits: str, exclusive: bool) -> list[str]:
    """Fraction expressions >= (or >) 0.digits; "" stands for no fraction at all."""
    parts = ["", f"{DIGIT}+"] if not digits and not exclusive else []
    if not parts:
        for i, digit in enumerate(digits):
            if digit != "9":
                parts.append(_join(digits[:i], f"[{int(digit) + 1}-9] {DIGIT}*"))
        tail = f'"0"* [1-9] {DIGIT}*' if exclusive else f"{DIGIT}*"
        parts.append(_join(digits, tail))
    return parts


def _at_most(digits: str, exclusive: bool) -> list[str]:
    """Fraction expressions <= (or <) 0.digits."""
    if not digits:
        return [] if exclusive else ["", '"0"+']
    parts = [""]
    for i, digit in enumerate(digits):
        if digit != "0":
            parts.append(_join(digits[:i], f"[0-{int(digit) - 1}] {DIGIT}*"))
        if i:
            parts.append(f'"{digits[:i]}"')
    if not exclusive:
        parts.append(_join(digits, '"0"*'))
    return parts


def _between(low: str, low_exclusive: bool, high: str, high_exclusive: bool) -> list[str]:
    """Fraction expressions between 0.low and 0.high, low <= high, both padded to one length."""
    if not low and not low_exclusive:
        return _at_most(high, high_exclusive)
    width = max(len(low), len(high))
    low, high = low.ljust(width, "0"), high.ljust(width, "0")
    if low == high:
        return [_join(low, '"0"*')]
    common = next(i for i in range(width) if low[i] != high[i])
    parts = []
    first, last = int(low[common]), int(high[common])
    if last - first > 1:
        parts.append(_join(low[:common], f"[{first + 1}-{last - 1}] {DIGIT}*"))
    # Above `low` with its own digit at `common`, then below `high` with its own.
    rest = low[common + 1 :].rstrip("0")
    parts += [_prefixed(low[: common + 1], f) for f in _at_least(rest, low_exclusive)]
    rest = high[common + 1 :].rstrip("0")
    parts += [_prefixed(high[: common + 1], f) for f in _at_most(rest, high_exclusive)]
    return [p for p in parts if p]


def _join(prefix: str, expression: str) -> str:
    return f'"{prefix}" {expression}' if prefix else expression


def _prefixed(prefix: str, expression: str) -> str:
    return f'"{prefix}" {expression}' if expression else f'"{prefix}"'
