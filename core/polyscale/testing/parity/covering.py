"""Covering arrays: few rows in which every combination of values of any ``strength`` factors occurs.

Notable: greedy, one row at a time (Cohen et al. 1997, "The AETG system"), without random choice: equal factors give
equal rows in every process. Two factors of four values and eight of two need about 18 rows instead of 4096.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

Value = Hashable
Combination = tuple[tuple[str, Value], ...]


def covering_array(factors: Mapping[str, Sequence[Value]], *, strength: int = 2) -> list[dict[str, Value]]:
    """Return rows (factor -> value) that cover every combination of values of every ``strength`` factors."""
    missing = dict.fromkeys(combinations(factors, strength))
    rows: list[dict[str, Value]] = []
    while missing:
        row = dict(next(iter(missing)))
        for name in factors:
            if name not in row:
                row[name] = _best_value(name, factors, row, missing, strength)
        for found in itertools.combinations([(name, row[name]) for name in factors], strength):
            missing.pop(found, None)
        rows.append({name: row[name] for name in factors})
    return rows


def combinations(factors: Mapping[str, Sequence[Value]], strength: int) -> list[Combination]:
    """List every combination of values of every ``strength`` factors, in the order of ``factors``."""
    return [
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(factors, strength)
        for values in itertools.product(*(factors[name] for name in names))
    ]


def _best_value(
    name: str,
    factors: Mapping[str, Sequence[Value]],
    row: Mapping[str, Value],
    missing: Mapping[Combination, None],
    strength: int,
) -> Value:
    """The value of ``name`` that covers most missing combinations; ties go round, so that rows differ."""
    order = list(factors)
    others = list(itertools.combinations([other for other in order if other in row], strength - 1))

    def gain(value: Value) -> int:
        chosen = {**row, name: value}
        count = 0
        for names in others:
            ordered = sorted((*names, name), key=order.index)
            count += tuple((each, chosen[each]) for each in ordered) in missing
        return count

    values = factors[name]
    start = len(missing) % len(values)
    return max([*values[start:], *values[:start]], key=gain)
