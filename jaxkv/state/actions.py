"""The three persistence actions, ordered by protection and cost (PASK §3.2)."""

from typing import Final

RELEASE: Final = 0
LOW: Final = 1
HIGH: Final = 2
ACTION_NAMES: Final = ("release", "low", "high")
