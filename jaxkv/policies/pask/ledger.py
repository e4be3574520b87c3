"""The exact decode ledger (PASK §3.5, B.6): R_t = t b - sum of charges, as an int32 whole part and numerator.

Costs are integers in reduced units and b = B_D C_full is a rational p/q, so R_t is always an integer plus k/q with
0 <= k < q. Nothing is rounded: after any number of steps within the checked range, the ledger equals one kept in
arbitrary-precision fractions.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.policies.pask.table import Table


class Ledger(NamedTuple):
    """R_t = balance + fraction / denominator of each row, in cost units, the current token's allowance included.

    `balance` is the floor of R_t and negative while there is debt.
    """

    balance: Int[Array, "B"]
    fraction: Int[Array, "B"]


def open_ledger(table: Table, rows: int) -> Ledger:
    """R_1 = b in every row."""
    return Ledger(
        balance=jnp.broadcast_to(table.allowance, (rows,)),
        fraction=jnp.broadcast_to(table.allowance_fraction, (rows,)),
    )


def reopen_row(table: Table, ledger: Ledger, row: Int[Array, ""] | int) -> Ledger:
    """R_1 = b in one row."""
    return Ledger(
        balance=ledger.balance.at[row].set(table.allowance),
        fraction=ledger.fraction.at[row].set(table.allowance_fraction),
    )


def spendable(table: Table, ledger: Ledger, parser_state: Int[Array, "B"]) -> Int[Array, "B"]:
    """floor(B_t), B_t = [R_t - Gamma(s_t)]+ (Eq. 11).

    An integer cost M fits the rational B_t exactly when it fits its floor.
    """
    borrow = ledger.fraction < table.reserve_fraction[parser_state]
    return jnp.maximum(ledger.balance - table.reserve[parser_state] - borrow, 0)


def settle(table: Table, ledger: Ledger, spent: Int[Array, "B"], charged: Bool[Array, "B"]) -> Ledger:
    """R_{t+1} = R_t - M(a_t) + b in the charged rows; the others keep their balance (Algorithm 2, line 8)."""
    fraction = ledger.fraction + table.allowance_fraction
    carry = fraction >= table.denominator
    fraction = fraction - jnp.where(carry, table.denominator, 0)
    balance = ledger.balance - spent + table.allowance + carry
    return Ledger(
        balance=jnp.where(charged, balance, ledger.balance),
        fraction=jnp.where(charged, fraction, ledger.fraction),
    )
