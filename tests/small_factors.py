"""Factors of access patterns that samples hardly exercise."""

from __future__ import annotations

from fluidx.ir import OpDef, opdef
from fluidx.testing.rows.case import Case, has_rows


def small_factors(op: str | type[OpDef], least: int = 2) -> list[str]:
    """The factors of an op's pattern whose size is below `least` in all of its samples, so that rows over them are hardly tested."""
    definition = opdef(op) if isinstance(op, str) else op
    best: dict[str, int] = {}
    if not has_rows(definition):
        return []
    for k, sample in enumerate(definition.samples()):
        case = Case(definition, k, sample, False)
        for f in _named_factors(definition, case):
            best[f] = max(best.get(f, 1), *(case.size(g) for g in case.pattern.sizes if g == f or (f == "*" and g[0] == "*")), 1)
    return [f for f, size in best.items() if size < least]


def _named_factors(definition: type[OpDef], case: Case) -> set[str]:
    """The factors that the pattern for a sample names, including factors of size 1 and 0."""
    pattern = definition.pattern
    if callable(pattern):
        pattern = pattern(case.in_types, case.out_types, case.attrs)
    text = pattern[0] if isinstance(pattern, tuple) else pattern
    body = (text or "").partition("|")[0]
    for mark in ("->", ",", "(", ")", "~"):
        body = body.replace(mark, " ")
    return {w for w in body.split() if w != "."}
