"""Break rank programs in every way that a wrong transpiler could, to see that the verifier notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator, Role
from ..ir.program import Program
from ..ir.types import TensorType

_COMM = (Effect.COLLECTIVE, Effect.P2P)


def mutations(programs: Sequence[Program]) -> Iterator[tuple[str, list[Program]]]:
    """Yield (what was broken, all rank programs with one of them broken).

    Dropped, swapped, duplicated, resized, re-rooted and re-grouped communication, wrong scales and wrong peers, on every rank. Every
    mutant computes something else, or hangs; mutants that would mean the same are not made.
    """
    for rank, program in enumerate(programs):
        for what, mutant in _of_one(program, len(programs)):
            yield f"rank {rank}: {what}", [mutant if r == rank else p for r, p in enumerate(programs)]


def _of_one(program: Program, ranks: int) -> Iterator[tuple[str, Program]]:
    ops = program.global_block().oplist
    for i, op in enumerate(ops):
        effect = OPS[op.type].effect
        text = f"{op.type} number {i}"
        if effect in _COMM and op.type != "nccl_init":
            yield from _communication(program, ops, i, op, text, ranks)
        if op.role is Role.DIST and op.type == "scale":
            yield f"wrong scale in {text}", _with(program, i, op.replace(attrs={**op.attrs, "scale": op.attrs["scale"] * 2}))
        if op.role is Role.DIST and op.type == "sum":
            yield f"term left out of {text}", _with(program, i, op.replace(inputs={"X": op.input("X")[:1]}))
        if op.role is Role.DIST and op.type == "chunk":
            start, stop = op.attrs["start"], op.attrs["stop"]
            moved = {**op.attrs, "start": start + 1, "stop": stop + 1} if start == 0 else {**op.attrs, "start": start - 1, "stop": stop - 1}
            yield f"wrong elements in {text}", _with(program, i, op.replace(attrs=moved))
        if op.role is Role.OPTIMIZE and "Param" in op.inputs and op.output("ParamOut"):
            yield f"update {i} left out", _without(program, i)
            yield f"update {i} made twice", _inserted(program, i, op)


def _communication(program: Program, ops: Sequence[Operator], i: int, op: Operator, text: str, ranks: int) -> Iterator[tuple[str, Program]]:
    if ranks > 1 or op.type not in ("all_reduce", "broadcast"):
        yield f"{text} dropped", _without(program, i)
    if ranks == 1:
        return
    yield f"{text} duplicated", _inserted(program, i, op)
    j = next((j for j in range(i + 1, len(ops)) if OPS[ops[j].type].effect in _COMM), None)
    if j is not None and _order_matters(op, ops[j]) and not _same_constant(ops, op, ops[j]):
        swapped = program.copy()
        block = swapped.global_block().oplist
        if op.type in ("send", "recv") or set(op.output_arg_names).isdisjoint(n for o in ops[i + 1 : j + 1] for n in o.input_arg_names):
            block[i], block[j] = block[j], block[i]
            yield f"{text} swapped with number {j}", swapped
    attrs = op.attrs
    if "root" in attrs:
        yield f"{text} re-rooted", _with(program, i, op.replace(attrs={**attrs, "root": (attrs["root"] + 1) % ranks}))
    if "peer" in attrs:
        other = next(r for r in range(ranks + 1) if r not in (attrs["peer"], program.rank))
        yield f"{text} with a wrong peer", _with(program, i, op.replace(attrs={**attrs, "peer": other}))
    if attrs.get("op") in ("avg", "sum"):
        wrong = "sum" if attrs["op"] == "avg" else "avg"
        yield f"wrong scale ({wrong}) in {text}", _with(program, i, op.replace(attrs={**attrs, "op": wrong}))
    regrouped = _with(program, i, op.replace(attrs={**attrs, "group": "alone"}))
    regrouped.groups = {**regrouped.groups, "alone": tuple((r,) for r in range(ranks))}
    yield f"{text} re-grouped", regrouped
    yield from _resized(program, i, op, text)


def _order_matters(a: Operator, b: Operator) -> bool:
    """Neighbours whose order the other ranks see: collectives of one group, messages to one peer in one batch."""
    if a.type in ("send", "recv"):
        return a.type == b.type and (a.attrs["batch"], a.attrs["peer"]) == (b.attrs.get("batch"), b.attrs.get("peer"))
    return "peer" not in b.attrs and a.attrs["group"] == b.attrs["group"] and (a.type, a.inputs, a.outputs) != (b.type, b.inputs, b.outputs)


def _same_constant(ops: Sequence[Operator], a: Operator, b: Operator) -> bool:
    """Both carry the same constant, so that either may be taken for the other."""
    values = []
    for op in (a, b):
        source = next((o for o in ops if o.output_arg_names[:1] == op.input_arg_names[:1]), None)
        values.append(source.attrs.get("value") if source is not None and source.type == "fill_constant" else op)
    return values[0] == values[1]


def _resized(program: Program, i: int, op: Operator, text: str) -> Iterator[tuple[str, Program]]:
    if op.type == "recv":
        shape = (*op.attrs["shape"][:-1], op.attrs["shape"][-1] + 1)
        new = _with(program, i, op.replace(attrs={**op.attrs, "shape": shape}))
        out = op.output_arg_names[0]
    elif op.input_arg_names:
        new, out = program.copy(), op.input_arg_names[0]
    else:
        return
    descs = new.global_block().descs
    t = descs[out].type
    descs[out] = descs[out].changed(type=TensorType(t.dtype, (*t.shape[:-1], t.shape[-1] + 1)))
    yield f"{text} resized", new


def _with(program: Program, i: int, op: Operator) -> Program:
    new = program.copy()
    new.global_block().oplist[i] = op
    return new


def _without(program: Program, i: int) -> Program:
    new = program.copy()
    del new.global_block().oplist[i]
    return new


def _inserted(program: Program, i: int, op: Operator) -> Program:
    new = program.copy()
    new.global_block().oplist.insert(i, op)
    return new
