"""Text of the access patterns of an op, and of the placement rules that follow from them, for the op's samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..ir.dtypes import as_dtype
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.rows import FLAT, ROOT, PlacementRow
from ..ir.rows import rows as rows_of
from ..ir.types import Entry, TensorType


def patterns(op: str | type[OpDef]) -> list[str]:
    """The access patterns that an op declares for its samples, without repetitions; empty for an op without a pattern.

    >>> patterns("relu")
    ['* -> * | U(0)']
    """
    definition = opdef(op) if isinstance(op, str) else op
    if definition.pattern is None or definition.effect in (Effect.COLLECTIVE, Effect.P2P):
        return []
    lines = [_line(definition, *case) for case in _cases(definition)]
    return list(dict.fromkeys(" ".join(line.split()).removesuffix(" |") for line in lines))


def rules(op: str | type[OpDef], sample: int = 0) -> str:
    """The placement rules of an op for one of its samples: the placements of operands over a group, and those of the results.

    >>> print(rules("softmax"))
    softmax of f32[3,5]: e0 c -> e0 c | c!
      cut e0     shard(0) -> shard(0)
      at a root  at(r) -> at(r)
      whole      whole -> whole
    """
    definition = opdef(op) if isinstance(op, str) else op
    cases = list(_cases(definition))
    if not 0 <= sample < len(cases):
        raise ProgramError(f"op {definition.name} has {len(cases)} samples, numbered from 0; got {sample}")
    ins, outs, attrs = cases[sample]
    p = definition.pattern_of(ins, outs, attrs)
    table = [row for row in rows_of(p) if row.kind != "own"]  # every op has the row `own`
    types = ", ".join("none" if t is None else repr(t) for t in ins)
    head = f"{definition.name} of {types}: {' '.join(_line(definition, ins, outs, attrs).split())}"
    wide = max(len(row.why) for row in table)
    return "\n".join([head.removesuffix(" |"), *(f"  {row.why:{wide}}  {_row(row, p.shape_only)}" for row in table)])


def _row(row: PlacementRow, shape_only: frozenset[int]) -> str:
    ins = ", ".join("any" if k in shape_only else _entry(e) for k, e in enumerate(row.ins))
    return f"{ins} -> {', '.join(map(_entry, row.outs))}".strip()


def _entry(e: Entry | None) -> str:
    if e is None:
        return "whole"
    return "at(r)" if e is ROOT else "pieces(...)" if e is FLAT else e.label


def _line(definition: type[OpDef], ins: list[Any], outs: list[Any], attrs: dict[str, Any]) -> str:
    pattern = definition.pattern(ins, outs, attrs) if callable(definition.pattern) else definition.pattern
    text = pattern[0] if isinstance(pattern, tuple) else pattern
    return "every operand whole" if text is None else text


def _cases(definition: type[OpDef]) -> Iterator[tuple[list[TensorType | None], list[TensorType | None], dict[str, Any]]]:
    """Operand types, output types and attributes of each sample."""
    for s in definition.samples():
        attrs = definition.complete_attrs(s.attrs)
        args = [*s.args, *[None] * (len(definition.in_slots) - len(s.args))]
        types: list[Any] = [[_type(v) for v in a] if slot.many else _type(a) for slot, a in zip(definition.in_slots, args, strict=True)]
        got = definition.infer(*types, **attrs)
        made = [got] if len(definition.out_slots) == 1 else list(got)
        yield (
            [t for slot, ts in zip(definition.in_slots, types, strict=True) for t in (ts if slot.many else [ts])],
            [t for slot, ts in zip(definition.out_slots, made, strict=True) for t in (ts if slot.many else [ts])],
            attrs,
        )


def _type(value: Any) -> TensorType | None:
    return None if value is None else TensorType(as_dtype(value.dtype), value.shape)
