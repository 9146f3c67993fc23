"""Update a variable in place, part by part: when an operator joins parts to a variable's new value, each part is written over the old one.

A strategy that updates flat ranges of parameters ends with such an operator: it joins the range that this rank updated and the ranges that
it received. Parts that are written at their final places need no copy. This is allowed if all readers of the old value run before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...ir.opdef import opdef
from ...ir.operator import Operator
from .liveness import op_writes
from .records import StridedView
from .selection import Outline

if TYPE_CHECKING:
    from .storage import StorageAssignment


def written_once(outline: Outline) -> Mapping[str, int]:
    """The state variables that exactly one operator writes, with the operator's number in the outline."""
    descs = outline.program.global_block().descs
    found: dict[str, list[int]] = {}
    for k, names in enumerate(outline.fact(op_writes)):
        for n in names:
            if n in descs and descs[n].persistable:
                found.setdefault(n, []).append(k)
    return {n: at[0] for n, at in found.items() if len(at) == 1}


def may_assemble(storage: StorageAssignment, i: float, unit: Sequence[Operator], whole: str, name: str, strided: StridedView) -> bool:
    """May a result of unit `i` be written into its part of the variable `whole`, over the old value?

    A single operator may read the old elements that it overwrites, element by element.
    """
    outline, spans = storage.outline, storage.spans
    at = outline.fact(_numbers)
    start, stop = at.get(id(unit[0])), outline.fact(written_once)[whole]
    if start is None or (name in storage.on_host) is not (whole in storage.on_host):
        return False
    start -= int(i) - spans[i][0] if i in spans else 0  # the messages of a batch start together
    own = storage.pairs[id(unit[0])].get(name) if len(unit) == 1 else None
    if own is not None and not (storage.types[own] == storage.types[name] and _is_at(storage, own, strided)):
        own = None
    old = [whole]
    for seen in old:
        if seen != whole and _is_apart(storage, seen, name, strided):
            continue
        for op in storage.readers.of.get(seen, ()):
            if start <= at.get(id(op), start) <= stop and not (op is unit[0] and seen == own):
                return False
            if opdef(op.type).storage.view is not None or opdef(op.type).storage.view_ctx is not None:
                old += op.output_arg_names
    return True


def _is_at(storage: StorageAssignment, name: str, strided: StridedView) -> bool:
    return storage.starts.get(name, 0) == strided.offset and storage.shadow[name].strides == strided.strides


def _is_apart(storage: StorageAssignment, view: str, name: str, strided: StridedView) -> bool:
    """Is a value made from a variable either not a view of it, or a view that shares no byte with the place of the result?"""
    if view not in storage.view_of:  # an operator that makes a view later reads the variable later
        return True
    start, stop = storage.starts[view], storage.starts[view] + storage.types[view].nbytes
    return storage.shadow[view].flags.c_contiguous and (stop <= strided.offset or strided.offset + storage.types[name].nbytes <= start)


def _numbers(outline: Outline) -> dict[int, int]:
    """The number of each operator, by its id."""
    return {id(op): k for k, op in enumerate(outline.ops)}
