"""Proof of hierarchical collectives: a sequence of collectives over smaller groups gives the result of one collective over all ranks.

The proof tracks, for every element on every rank, the set of ranks whose terms are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..ir.parts import bounds
from .refusal import Refusal


class _LocalValue(NamedTuple):
    """The elements on a rank, in order, and for each the ranks whose terms are in it, as a bit mask."""

    elements: tuple[int, ...]
    terms: tuple[int, ...]


State = list[_LocalValue | None]
Groups = Mapping[str, Sequence[Sequence[int]]]


def prove_sequence(
    collective: str, groups: Groups, stages: Sequence[tuple[str, str, int]], size: int, world_size: int, root: int = 0
) -> Refusal | None:
    """None if the stages, each (collective, group, root), give the result of a collective of all ranks on a value of `size` rows.

    Otherwise the Refusal that names the wrong stage, or the rank with a wrong result.

    >>> hosts = {"node": [(0, 1), (2, 3)], "rail": [(0, 2), (1, 3)]}
    >>> prove_sequence("all_reduce", hosts, [("all_reduce", "node", 0), ("all_reduce", "rail", 0)], 5, 4)
    >>> print(prove_sequence("all_reduce", hosts, [("all_reduce", "node", 0)], 5, 4))
    at the end, rank 0 has of element 0 the terms of ranks 0, 1; rank 2's is missing
    """
    if collective not in _STAGES:
        return Refusal(f"there is no collective {collective!r} for a sequence; there are: {', '.join(_STAGES)}")
    state = _initial_state(collective, world_size, size, root)
    try:
        for k, (type_, group, at) in enumerate(stages):
            state = _run_stage(state, type_, group, groups, at, f"stage {k + 1}, {type_} over {group}")
        _check_result(collective, state, size, root)
    except Refusal as e:
        return e
    return None


def _initial_state(collective: str, n: int, size: int, root: int) -> State:
    whole, marks = tuple(range(size)), bounds(size, n)
    if collective == "broadcast":
        return [_LocalValue(whole, (1 << root,) * size) if rank == root else None for rank in range(n)]
    if collective == "all_gather":
        return [_LocalValue(part := whole[marks[k] : marks[k + 1]], (1 << k,) * len(part)) for k in range(n)]
    return [_LocalValue(whole, (1 << rank,) * size) for rank in range(n)]


def _check_result(collective: str, state: State, size: int, root: int) -> None:
    n, whole = len(state), tuple(range(size))
    marks = bounds(size, n)
    owner = [next(k for k in range(n) if marks[k] <= e < marks[k + 1]) for e in whole]
    for rank, value in enumerate(state):
        if collective == "reduce" and rank != root:
            continue
        due = whole[marks[rank] : marks[rank + 1]] if collective == "reduce_scatter" else whole
        if value is None or value.elements != due:
            found = "nothing" if value is None else _range(value.elements)
            raise Refusal(f"at the end, rank {rank} has {found}, and must have {_range(due)}")
        for e, terms in zip(value.elements, value.terms, strict=True):
            wanted = 1 << root if collective == "broadcast" else 1 << owner[e] if collective == "all_gather" else (1 << n) - 1
            if terms != wanted:
                missing = _ranks(wanted & ~terms)
                lacks = f"; rank {missing[0]}'s is missing" if missing else ""
                raise Refusal(f"at the end, rank {rank} has of element {e} {_terms_text(terms)}{lacks}")


def _run_stage(state: State, type_: str, group: str, groups: Groups, root: int, label: str) -> State:
    if type_ not in _STAGES:
        raise Refusal(f"{label}: there is no such collective; there are: {', '.join(_STAGES)}")
    if group not in groups:
        raise Refusal(f"{label}: there is no such group; there are: {', '.join(groups)}")
    out: State = list(state)
    for members in groups[group]:
        values = [state[r] for r in members]
        if all(h is None for h in values):  # such as a rail of ranks that are not roots
            continue
        if not 0 <= root < len(members):
            raise Refusal(f"{label}: root {root} is not an index of a group of {len(members)} ranks")
        for r, h in zip(members, _STAGES[type_](values, members, root, label), strict=True):
            out[r] = h
    return out


def _sum(values: Sequence[_LocalValue | None], members: Sequence[int], label: str) -> _LocalValue:
    """The sum of the terms of a group."""
    first = values[0]
    for r, h in zip(members, values, strict=True):
        if first is None or h is None or h.elements != first.elements:
            had = [f"rank {m} has {'nothing' if x is None else _range(x.elements)}" for m, x in ((members[0], first), (r, h))]
            raise Refusal(f"{label}: {' and '.join(had)}")
    assert first is not None
    terms = [0] * len(first.elements)
    for r, h in zip(members, values, strict=True):
        assert h is not None
        for k, new in enumerate(h.terms):
            if terms[k] & new:
                twice = _ranks(terms[k] & new)[0]
                raise Refusal(f"{label}: element {first.elements[k]} gets the term of rank {twice} a second time, from rank {r}")
            terms[k] |= new
    return _LocalValue(first.elements, tuple(terms))


def _all_reduce(values: Sequence[_LocalValue | None], members: Sequence[int], root: int, label: str) -> State:
    return [_sum(values, members, label)] * len(members)


def _reduce(values: Sequence[_LocalValue | None], members: Sequence[int], root: int, label: str) -> State:
    total = _sum(values, members, label)
    return [total if k == root else None for k in range(len(members))]


def _reduce_scatter(values: Sequence[_LocalValue | None], members: Sequence[int], root: int, label: str) -> State:
    elements, terms = _sum(values, members, label)
    marks = bounds(len(elements), len(members))
    return [_LocalValue(elements[a:b], terms[a:b]) for a, b in zip(marks, marks[1:], strict=False)]


def _broadcast(values: Sequence[_LocalValue | None], members: Sequence[int], root: int, label: str) -> State:
    if values[root] is None:
        raise Refusal(f"{label}: its root, rank {members[root]}, has nothing")
    return [values[root]] * len(members)


def _all_gather(values: Sequence[_LocalValue | None], members: Sequence[int], root: int, label: str) -> State:
    parts = [h for h in values if h is not None]
    if len(parts) < len(members):
        raise Refusal(f"{label}: rank {members[values.index(None)]} has nothing")
    sizes, marks = [len(p.elements) for p in parts], bounds(sum(len(p.elements) for p in parts), len(parts))
    if sizes != [b - a for a, b in zip(marks, marks[1:], strict=False)]:
        raise Refusal(f"{label}: ranks {_listed(members)} have {_listed(sizes)} elements, which are not the shards of an even split")
    whole = _LocalValue(tuple(e for p in parts for e in p.elements), tuple(t for p in parts for t in p.terms))
    return [whole] * len(members)


_STAGES: dict[str, Callable[[Sequence[_LocalValue | None], Sequence[int], int, str], State]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}


def _ranks(bits: int) -> list[int]:
    return [k for k in range(bits.bit_length()) if bits >> k & 1]


def _terms_text(bits: int) -> str:
    ranks = _ranks(bits)
    return f"the term{'s' * (len(ranks) > 1)} of rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(found: Sequence[int]) -> str:
    return ", ".join(map(str, found))


def _range(elements: Sequence[int]) -> str:
    if not elements:
        return "no elements"
    if [*elements] == [*range(elements[0], elements[-1] + 1)]:
        return f"elements {elements[0]} to {elements[-1]}"
    return f"elements {_listed(elements)}"
