"""PASK's controller and prompt plan again, the slow way: dictionaries, fractions, one token at a time, costs in bits.

Written from the paper's text and sharing no code with the jitted controller, to be held against it.
"""

from fractions import Fraction

from jaxkv.policies.pask.frozen_policy import FrozenPolicy
from jaxkv.state.payload import Costs

R, L, H = 0, 1, 2


class Twin:
    """One request's controller."""

    def __init__(self, frozen: FrozenPolicy, costs: Costs) -> None:
        self.frozen, self.costs = frozen, costs
        self.groups = range(len(costs.high))
        self.allowance = frozen.budget_decode * costs.full
        self.balance = self.allowance

    def m(self, action: int, group: int) -> int:
        return {R: 0, L: self.costs.low[group], H: self.costs.high[group]}[action]

    def payload(self, actions: list[int]) -> int:
        return sum(self.m(action, group) for group, action in enumerate(actions))

    def reserve(self, state: str) -> Fraction:
        share, ahead = self.frozen.reserve.states.get(state, self.frozen.reserve.pooled)
        units = -(-(share * self.costs.full / self.costs.unit) // 1)  # rounded up to a whole unit
        return max(Fraction(0), units * self.costs.unit - ahead * self.allowance)

    def candidates(self, tag: str | None) -> list[tuple]:
        """Calibrated rows behind a tag, and whether they are its own."""
        if tag in self.frozen.decode:
            return [self.frozen.decode[tag]]
        parts = tag.split("/") if tag else []
        for length in (3, 2, 1):
            below = [
                row for key, row in self.frozen.decode.items() if parts and key.split("/")[:length] == parts[:length]
            ]
            if below:
                return below
        return []

    def step(self, tags: list[str | None], state: str) -> list[int]:
        """Actions of one token; `tags` are its candidates, None for an unresolved one. No candidates: a stop token."""
        if not tags:
            return [R for _ in self.groups]
        own = len(tags) == 1 and tags[0] in self.frozen.decode
        rows, unresolved = [], False
        for tag in tags:
            found = self.candidates(tag)
            unresolved |= not found
            rows += found
        base = [max([H if unresolved else R] + [row[c].base for row in rows]) for c in self.groups]
        floor = [max([H if unresolved else R] + [row[c].floor for row in rows]) for c in self.groups]
        actions = [max(pair) for pair in zip(base, floor, strict=True)]
        if not own:
            floor = list(actions)
        scores = {(c, level): {row[c].scores[level] for row in rows} for c in self.groups for level in (0, 1)}

        budget = max(Fraction(0), self.balance - self.reserve(state))
        while self.payload(actions) > budget:
            undo = [(min(scores[c, actions[c] - 1]), c) for c in self.groups if actions[c] > floor[c]]
            if not undo:
                break
            actions[min(undo)[1]] -= 1
        if any(tag and (tag.split("/")[2] == "critical" or tag.split("/")[3] == "lookahead_critical") for tag in tags):
            while True:
                open_to = [c for c in self.groups if actions[c] < H and len(scores[c, actions[c]]) == 1]
                best = max(open_to, key=lambda c: (min(scores[c, actions[c]]), -c), default=None)
                if best is None:
                    break
                raised = [action + (c == best) for c, action in enumerate(actions)]
                if self.payload(raised) > budget:
                    break
                actions = raised
        self.balance += self.allowance - self.payload(actions)
        return actions


def plan(entries, labels, costs: Costs, budget: Fraction, window: int, sinks: int) -> list[list[int]]:
    """The prompt plan by searching the best open upgrade again and again."""
    n, groups = len(labels), range(len(costs.high))
    m = [(0, costs.low[c], costs.high[c]) for c in groups]
    actions = [[H if t < sinks or t >= n - window else entries[labels[t]][c].floor for c in groups] for t in range(n)]
    spent = sum(m[c][actions[t][c]] for t in range(n) for c in groups)
    while True:
        best = None
        for t in range(n):
            for c in groups:
                if actions[t][c] < H:
                    score = entries[labels[t]][c].scores[actions[t][c]]
                    if best is None or score > best[0]:
                        best = (score, t, c)
        if best is None:
            return actions
        _, t, c = best
        extra = m[c][actions[t][c] + 1] - m[c][actions[t][c]]
        if spent + extra > budget * n * costs.full:
            return actions
        spent += extra
        actions[t][c] += 1
