"""Models in 16 bits: they are trained with float32 parameters, and written in the dtypes of the file that was read.

`WidenHalves` makes a program of float32, in which `mixed_precision.decorate` then lets products work in 16 bits. It marks parameters,
inputs and casts with the dtype in the file (`saved_as`); `InFileDtypes` follows these marks from operator to operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ir import Block, Operator, Program, ProgramPair
from ..ir.dtypes import FLOATS, HALVES
from ..ir.opdef import opdef
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from ..ir.types import TensorType
from ..ir.var import Var
from ..mixed_precision import decorate

_WIDE = "float32"


def has_halves(program: Program) -> bool:
    """Does a program have parameters in 16 bits?"""
    return any(p.dtype in HALVES for p in program.all_parameters())


def in_precision(optimizer: Any, dtype: str) -> Any:
    """An optimizer that trains with products in a dtype: itself for float32, mixed precision for 16 bits. Only float16 needs a scaled loss.
    """
    if dtype not in HALVES:
        return optimizer
    unscaled: dict[str, Any] = {} if dtype == "float16" else {"init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False}
    return decorate(optimizer, dtype=dtype, **unscaled)


@dataclass(frozen=True)
class WidenHalves(Pass):
    """Every value in 16 bits becomes float32, also the parameters that the startup program fills."""

    requires = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        return ProgramPair(_widened(pair.main), _widened(pair.startup))


def _widened(program: Program) -> Program:
    made = program.copy()
    for block in made.blocks:
        said = {n for op in block.oplist if op.attrs.get("dtype") in FLOATS for n in op.output_arg_names}
        block.descs = {n: _marked(d, n in said) for n, d in block.descs.items()}
        block.oplist = [_with_dtype(op, _WIDE) if op.attrs.get("dtype") in HALVES else op for op in block.oplist]
    return made


def _marked(d: Var, said: bool) -> Var:
    """A declaration in float32. If no operand gives the dtype, it gets the mark."""
    if d.type.__class__ is not TensorType or d.type.dtype not in FLOATS:
        return d
    attrs = {**d.attrs, "saved_as": d.type.dtype} if said or d.persistable or d.is_data else d.attrs
    return d.changed(type=d.type.with_dtype(_WIDE) if d.type.dtype in HALVES else d.type, attrs=attrs)


def _with_dtype(op: Operator, dtype: str) -> Operator:
    return op.replace(attrs={**op.attrs, "dtype": dtype})


@dataclass(frozen=True)
class InFileDtypes(Pass):
    """The inference form of a program with values in the dtypes of the file that its model was read from.

    Casts that mixed precision added are dropped. New layers, adapters for example, compute in the dtype of what the file gives them. A
    program with branches or loops stays in float32.
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        made = program.copy()
        block = made.global_block()
        if not any("saved_as" in d.attrs for d in block.descs.values()) or made.num_blocks > 1:
            return made
        _Narrowing(block).run()
        return made


class _Narrowing:
    """Goes through the operators in order. `names`: value -> the value that stands for it; `new`: floats that only new layers made."""

    def __init__(self, block: Block):
        self.block, self.names, self.out = block, dict[str, str](), list[Operator]()
        self.new = {n for n, d in block.descs.items() if d.persistable and _is_float(d) and "saved_as" not in d.attrs}
        self.halves: dict[tuple[str, str], str] = {}

    def run(self) -> None:
        descs = self.block.descs
        for n, d in descs.items():
            if "saved_as" in d.attrs and (d.persistable or d.is_data):
                descs[n] = d.changed(type=d.type.with_dtype(d.attrs["saved_as"]))
        for op in self.block.oplist:
            self._take(op)
        self.block.oplist = self.out

    def _take(self, op: Operator) -> None:
        descs, outs = self.block.descs, op.output_arg_names
        inputs = {slot: tuple([self.names.get(n, n) for n in names]) for slot, names in op.inputs.items()}
        if op.type == "cast" and "saved_as" not in descs[outs[0]].attrs and self._both_float(op):
            self.names[outs[0]] = inputs["X"][0]
            return
        op = self._in_one_dtype(op.replace(inputs=inputs))
        if "dtype" in op.attrs and op.attrs["dtype"] in FLOATS and (dtype := descs[outs[0]].attrs.get("saved_as")):
            op = _with_dtype(op, dtype)
        types = {slot: [descs[n].type for n in names] for slot, names in op.inputs.items()}
        definition = opdef(op.type)
        for slot, found in zip(definition.out_slots, definition.infer_outputs(types, op.attrs), strict=True):
            for n, t in zip(op.outputs.get(slot.name, ()), found if isinstance(found, list) else [found]):
                self._declare(n, t, {m for names in op.inputs.values() for m in names})
        self.out.append(op)

    def _declare(self, name: str, made: Any, operands: set[str]) -> None:
        d = self.block.desc(name)
        if not _is_float(d):
            return
        if not d.persistable:
            self.block.descs[name] = d.changed(type=d.type.with_dtype(made.dtype))
        floats = {n for n in operands if _is_float(self.block.desc(n))}
        if floats and floats <= self.new:
            self.new.add(name)

    def _both_float(self, op: Operator) -> bool:
        return all(_is_float(self.block.desc(n)) for n in (*op.input_arg_names, *op.output_arg_names))

    def _in_one_dtype(self, op: Operator) -> Operator:
        """The operator, with casts of operands of new layers to the 16 bits of the others."""
        halves = {t.dtype for n in op.input_arg_names if (t := self.block.desc(n).type).__class__ is TensorType and t.dtype in HALVES}
        wide = [n for n in op.input_arg_names if n in self.new and self.block.desc(n).type.dtype == _WIDE]
        if len(halves) != 1 or not wide:
            return op
        (half,) = halves
        cast: Mapping[str, str] = {n: self._half_of(n, half, op) for n in dict.fromkeys(wide)}
        return op.replace(inputs={slot: tuple([cast.get(n, n) for n in names]) for slot, names in op.inputs.items()})

    def _half_of(self, name: str, half: str, near: Operator) -> str:
        made = self.halves.get((name, half))
        if made is None:
            made = self.halves[name, half] = f"{name}.{half}.saved"
            d = self.block.desc(name)
            self.block.declare(Var(made, d.type.with_dtype(half), stop_gradient=True))
            attrs = opdef("cast").complete_attrs({"dtype": half})
            self.out.append(near.replace(type="cast", inputs={"X": (name,)}, outputs={"Out": (made,)}, attrs=attrs, role_var=()))
        return made


def _is_float(d: Var) -> bool:
    return d.type.__class__ is TensorType and d.type.dtype in FLOATS
