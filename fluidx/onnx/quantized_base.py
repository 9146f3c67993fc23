"""Frozen weights as integers of 8 or 4 bits while adapters are trained beside them."""

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
from ..ir.constants import Array
from ..ir.mapped_file import MemoryFile
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from .adapters import A, B, products
from .errors import OnnxError

# the bits of a weight, and the elements that share a scale; 0: each output of the product has one
BASES = {"int8": (8, 0), "int4": (4, 32)}
_STRIP = 1 << 20  # elements that are quantized at a time


class _ReadWeight(NamedTuple):
    """A product with a weight: does it multiply by the transpose, and through which transpose operator does it read it, if any?"""

    op: Operator
    transposed: bool
    through: str


@dataclass(frozen=True)
class QuantizeBase(Pass):
    """Frozen float32 weights that only products read are stored as integers of `base`, and multiplied by matmul_n_bits."""

    base: str = "int8"
    requires = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        uses, (bits, size) = _uses(pair.main), BASES[self.base]
        if not uses:
            some = f"no frozen float32 weight that only products read, so base={self.base!r} stores none"
            raise OnnxError(f"Lora: {pair.main.label()} has {some}")
        main, startup = pair.main.copy(), pair.startup.copy()
        block, begin, stored = main.global_block(), startup.global_block(), MemoryFile()
        found: dict[str, list[tuple[int, tuple[int, ...], str]]] = {}
        for name, (first, *_) in uses.items():
            w = _value(pair.startup, name)
            made = quantized(w if first.transposed else w.T, bits, size)
            found[name] = [(stored.add(a), a.shape, a.dtype.name) for a in made]
        file = stored.mapped()  # the startup program and the parameter that it fills share these pages
        for name, places in found.items():
            y, scale = (file.array(offset, shape, np.dtype(kind)) for offset, shape, kind in places)
            begin.oplist = [op for op in begin.oplist if name not in op.output_arg_names]
            for b in (block, begin):
                b.declare(b.desc(name).changed(type=Array(y).type))
                b.create_var(f"{name}.scale", scale.shape, "float32", persistable=True, stop_gradient=True)
            NumpyArrayInitializer(y)(begin.var(name), begin)
            NumpyArrayInitializer(scale)(begin.var(f"{name}.scale"), begin)
        _replace_products(block, uses, bits)
        return ProgramPair(main, startup)


def _replace_products(block: Block, uses: Mapping[str, list[_ReadWeight]], bits: int) -> None:
    by_op = {id(use.op): name for name, some in uses.items() for use in some}
    dropped = {use.through for some in uses.values() for use in some}
    block.oplist, ops = [], block.oplist
    for op in ops:
        if id(op) in by_op:
            weight, (out,), b = by_op[id(op)], op.output_arg_names, Builder(block, role=op.role)
            b.site, b.device = op.site, op.device
            b.matmul_n_bits(block.var(op.inputs["X"][0]), block.var(weight), block.var(f"{weight}.scale"), bits=bits, name=out)
        elif not (op.type == "transpose" and op.output_arg_names[0] in dropped):
            block.oplist.append(op)
    for name in dropped - {""}:
        del block.descs[name]


def _uses(program: Program) -> dict[str, list[_ReadWeight]]:
    """The weights to store as integers -> the products that read them."""
    block, found = program.global_block(), dict[str, list[_ReadWeight]]()
    makers = {n: op for op in block.oplist for n in op.output_arg_names}
    read: dict[str, list[Operator]] = {}
    for b in program.blocks:
        for op in b.oplist:
            for n in op.input_arg_names:
                read.setdefault(n, []).append(op)
    for p in products(program):
        if p.op.type not in ("matmul", "mul"):
            continue
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
    """The value that startup gives one parameter. One that is in a file is read, so that no page of the file stays in memory."""
    writers = [op for op in startup.global_block().oplist if name in op.output_arg_names]
    held = writers[0].attrs.get("values") if len(writers) == 1 else None
    if isinstance(held, Array) and held.type == startup.global_block().desc(name).type:
        if (place := held.in_file) is None:
            return held.values
        found = np.empty(held.type.shape, held.values.dtype)
        place.read_into(found)
        return found
    alone, scope = startup.copy(), Scope()
    alone.global_block().oplist = writers
    Executor(CPUPlace()).run(alone, scope=scope)
    return np.asarray(scope.get(name))


def quantized(w: np.ndarray, bits: int, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The columns of a weight, rows of `w`, as matmul_n_bits reads them: integers in blocks of `size`, by default whole columns, and a
    scale for each block. The zero point is the middle. 8 bits go from -127 to 127; of 4 bits -8 is the largest element of a block.

    >>> y, scale = quantized(np.array([[0.5, -4.0, 1.0, 3.4]], np.float32), 4)
    >>> [(int(b) & 15) - 8 for b in y.ravel()], [(int(b) >> 4) - 8 for b in y.ravel()], scale.tolist()
    ([1, 2], [-8, 7], [[0.5]])
    """
    columns, rows = w.shape
    each = 8 // bits
    size = size or -(-rows // each) * each
    blocks = -(-rows // size)
    y, scale = np.empty((columns, blocks, size // each), np.uint8), np.empty((columns, blocks), np.float32)
    step = max(1, _STRIP // max(1, rows))
    for k in range(0, columns, step):
        part = slice(k, k + step)
        v = np.zeros((len(scale[part]), blocks * size), np.float32)
        v[:, :rows] = w[part]
        y[part], scale[part] = _strip(v.reshape(len(v), blocks, size), bits)
    return y, scale


def _strip(v: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [columns, blocks, elements] as packed integers, and their scales."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(v, np.abs(v).argmax(axis=2, keepdims=True), axis=2)
    scale = np.abs(largest) / np.float32(half - 1) if bits == 8 else largest / np.float32(-half)
    scale[largest == 0] = 1
    q = np.clip(np.rint(v / scale) + half, 0, 2 * half - 1).astype(np.uint8)
    each = 8 // bits
    packed = q[..., ::each].copy()
    for k in range(1, each):
        packed |= q[..., k::each] << np.uint8(k * bits)
    return packed, scale[..., 0]
