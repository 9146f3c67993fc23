"""Frozen weights as 8-bit integers, with a scale for each output, while adapters are trained beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..executor import Executor
from ..executor.places import CPUPlace
from ..executor.scope import Scope
from ..initializer import NumpyArrayInitializer
from ..ir import Block, Builder, Operator, Program, ProgramPair
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from .adapters import A, B, products
from .errors import OnnxError


class _ReadWeight(NamedTuple):
    """A product with a weight: does it multiply by the transpose, and through which transpose operator does it read it, if any?"""

    op: Operator
    transposed: bool
    through: str


@dataclass(frozen=True)
class StoreBaseAsInt8(Pass):
    """Frozen float32 weights that only products read are stored as int8, `W = Q * scale` with a scale for each output of the product."""

    requires = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        uses = _uses(pair.main)
        if not uses:
            raise OnnxError(f"Lora: {pair.main.label()} has no frozen float32 weight that only products read, so base='int8' stores none")
        main, startup = pair.main.copy(), pair.startup.copy()
        block, begin = main.global_block(), startup.global_block()
        for name, (first, *_) in uses.items():
            q, scale = _quantized(_value(pair.startup, name), first.transposed)
            begin.oplist = [op for op in begin.oplist if name not in op.output_arg_names]
            for b in (block, begin):
                b.declare(b.desc(name).changed(type=b.desc(name).type.with_dtype("int8")))
                b.create_var(f"{name}.scale", scale.shape, "float32", persistable=True, stop_gradient=True)
            NumpyArrayInitializer(q)(begin.var(name), begin)
            NumpyArrayInitializer(scale)(begin.var(f"{name}.scale"), begin)
        by_op = {id(use.op): (name, use) for name, some in uses.items() for use in some}
        dropped = {use.through for some in uses.values() for use in some}
        block.oplist, ops = [], block.oplist
        for op in ops:
            if id(op) in by_op:
                self._write(block, op, *by_op[id(op)])
            elif not (op.type == "transpose" and op.output_arg_names[0] in dropped):
                block.oplist.append(op)
        for name in dropped - {""}:
            del block.descs[name]
        return ProgramPair(main, startup)

    def _write(self, block: Block, op: Operator, weight: str, use: _ReadWeight) -> None:
        (out,) = op.output_arg_names
        b = Builder(block, role=op.role)
        b.site, b.device = op.site, op.device
        whole = b.matmul_int8(block.var(op.inputs["X"][0]), block.var(weight), transpose_y=use.transposed, name=f"{out}.int8")
        b.elementwise_mul(whole, block.var(f"{weight}.scale"), name=out)


def _uses(program: Program) -> dict[str, list[_ReadWeight]]:
    """The weights to store as int8 -> the products that read them."""
    block, found = program.global_block(), dict[str, list[_ReadWeight]]()
    makers = {n: op for op in block.oplist for n in op.output_arg_names}
    read: dict[str, list[Operator]] = {}
    for b in program.blocks:
        for op in b.oplist:
            for n in op.input_arg_names:
                read.setdefault(n, []).append(op)
    for p in products(program):
        desc, y = block.desc(p.weight), p.op.inputs["Y"][0]
        plain = not p.op.attrs.get("transpose_x") and p.op.attrs.get("alpha", 1.0) == 1.0
        if desc.attrs.get("trainable", True) or desc.type.dtype != "float32" or p.weight.endswith((A, B)) or not plain:
            continue
        through = "" if y == p.weight else y
        if through and (makers[y].type != "transpose" or makers[y].inputs["X"][0] != p.weight):
            continue
        turned = bool(p.op.attrs.get("transpose_y", False)) != bool(through)
        found.setdefault(p.weight, []).append(_ReadWeight(p.op, turned, through))
    return {n: uses for n, uses in found.items() if _only(uses, read, n, makers)}


def _only(uses: list[_ReadWeight], read: Mapping[str, list[Operator]], name: str, makers: Mapping[str, Operator]) -> bool:
    """Do only these products read the weight, all in one way?"""
    own = {id(use.op) for use in uses} | {id(makers[use.through]) for use in uses if use.through}
    readers = [op for n in {name, *(use.through for use in uses)} for op in read.get(n, ())]
    return len({use.transposed for use in uses}) == 1 and all(id(op) in own for op in readers)


def _value(startup: Program, name: str) -> np.ndarray:
    """The value that startup gives one parameter."""
    alone, scope = startup.copy(), Scope()
    block = alone.global_block()
    block.oplist = [op for op in block.oplist if name in op.output_arg_names]
    Executor(CPUPlace()).run(alone, scope=scope)
    return np.asarray(scope.get(name))


def _quantized(w: np.ndarray, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Integers between -127 and 127, and the scale of each output."""
    largest = np.abs(w).max(axis=1 if transposed else 0, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    q = np.rint(w / scale).astype(np.int8)
    q.setflags(write=False)  # so that the startup program keeps it without a copy
    return q, scale.reshape(-1)
