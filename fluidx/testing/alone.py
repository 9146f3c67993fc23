"""A program that is one operator, written from a sample of its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir import Builder, Program, TensorType, Variable
from ..ir.dtypes import dtype_name
from ..ir.opdef import OPS, OpDef


def alone(name: str, sample: Any) -> tuple[Program, list[Variable], dict[str, np.ndarray]]:
    """(program, its fetches, what is fed): the operator alone, in its inference form where it has one, with a sample's operands fed."""
    definition, program = OPS[name], Program(name)
    feed: dict[str, np.ndarray] = {}
    operands: list[Any] = []
    for slot, arg in zip(definition.in_slots, sample.args):
        arrays = arg if isinstance(arg, (list, tuple)) else [] if arg is None else [arg]
        found = []
        for k, a in enumerate(map(np.asarray, arrays)):
            feed[f"{slot.name}{k}"] = a
            found.append(program.global_block().create_var(f"{slot.name}{k}", a.shape, dtype_name(a.dtype), is_data=True))
        operands.append(found if slot.many else found[0] if found else None)
    attrs = {**sample.attrs, **({"is_test": True} if "is_test" in definition.attrs else {})}
    made = Builder(program.global_block()).emit(name, *operands, n_out=_many(definition, sample.args, attrs), **attrs)
    first = made[0] if isinstance(made, tuple) else made
    return program, first if isinstance(first, list) else [first], feed


def _many(definition: type[OpDef], args: Any, attrs: Mapping[str, Any]) -> int:
    """How many results the slot of an operator has that may have several."""
    if not any(slot.many for slot in definition.out_slots):
        return 0
    types = [[_type(a) for a in arg] if isinstance(arg, (list, tuple)) else None if arg is None else _type(arg) for arg in args]
    types += [None] * (len(definition.in_slots) - len(types))
    found = definition.infer(*types, **definition.complete_attrs(attrs))
    return next(len(t) for t in ((found,) if isinstance(found, list) else found) if isinstance(t, list))


def _type(a: Any) -> TensorType:
    return TensorType(dtype_name(np.asarray(a).dtype), np.shape(a))


def in_onnx(name: str) -> list[str]:
    """The operators of ONNX that an operator is written with, for those of its samples that ONNX has. Needs the package onnx.

    >>> in_onnx("thresholded_relu")
    ['LessOrEqual', 'Where']
    """
    from ..onnx.errors import OnnxError
    from ..onnx.export import to_onnx
    from ..onnx.exporters import EXPORTERS, load_all
    from ..onnx.exporters.elementwise import has_expression

    load_all()
    if name not in EXPORTERS and not has_expression(name):
        return []
    found: set[str] = set()
    for sample in OPS[name].samples():
        program, fetches, _ = alone(name, sample)
        try:
            found |= {node.op_type for node in to_onnx(program, None, fetches).graph.node}
        except OnnxError:
            continue
    return sorted(found - {"Constant"})
