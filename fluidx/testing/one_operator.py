"""Programs of one operator, built from the samples in the declaration of an op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir import Builder, Program, TensorType, Variable
from ..ir.dtypes import dtype_name
from ..ir.opdef import OPS, OpDef


def program_of_sample(name: str, sample: Any) -> tuple[Program, list[Variable], dict[str, np.ndarray]]:
    """Build a program of one operator, with the operands of a sample as feeds: (program, fetches, feed).

    An op with the attribute `is_test` is built in its inference form.
    """
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
    made = Builder(program.global_block()).emit(name, *operands, n_out=_list_length(definition, sample.args, attrs), **attrs)
    first = made[0] if isinstance(made, tuple) else made
    return program, first if isinstance(first, list) else [first], feed


def _list_length(definition: type[OpDef], args: Any, attrs: Mapping[str, Any]) -> int:
    """The number of results in the output slot that takes a list; 0 if there is no such slot."""
    if not any(slot.many for slot in definition.out_slots):
        return 0
    types = [[_type(a) for a in arg] if isinstance(arg, (list, tuple)) else None if arg is None else _type(arg) for arg in args]
    types += [None] * (len(definition.in_slots) - len(types))
    found = definition.infer(*types, **definition.complete_attrs(attrs))
    return next(len(t) for t in ((found,) if isinstance(found, list) else found) if isinstance(t, list))


def _type(a: Any) -> TensorType:
    return TensorType(dtype_name(np.asarray(a).dtype), np.shape(a))


def onnx_operators(name: str) -> list[str]:
    """The types of the ONNX operators that the exporter writes for an op, over all of its samples. Needs the package onnx.

    Samples that ONNX cannot express are left out.

    >>> onnx_operators("hard_shrink")
    ['Abs', 'LessOrEqual', 'Where']
    """
    from ..onnx.errors import OnnxError
    from ..onnx.export import to_onnx
    from ..onnx.export_graph import has_nodes
    from ..onnx.table import load_all

    load_all()
    if not has_nodes(name):
        return []
    found: set[str] = set()
    for sample in OPS[name].samples():
        program, fetches, _ = program_of_sample(name, sample)
        try:
            found |= {node.op_type for node in to_onnx(program, None, fetches).graph.node}
        except OnnxError:
            continue
    return sorted(found - {"Constant"})
