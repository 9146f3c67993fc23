"""Operators of fluidx computed at once, on values that are known: an import function that gets a `HostBuilder` computes its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from ..executor.context import RunContext
from ..ir import Builder, Program, TensorType
from ..ir.dtypes import as_dtype, np_dtype
from ..ir.opdef import OpDef, opdef
from ..ir.types import ANY
from ..ops import kernels
from .limits import checked_shape


class HostTensor:
    """A known array where import functions expect a variable."""

    __slots__ = ("array", "type")
    name = ""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.type = TensorType(_dtype_name(array.dtype), array.shape)

    @property
    def desc(self) -> HostTensor:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.ndim


class HostBuilder(Builder):
    """A builder whose methods compute instead of writing operators. Operands and results are HostTensors.

    >>> b = HostBuilder()
    >>> b.concat([HostTensor(np.array([1, 2])), HostTensor(np.array([3]))], axis=0).array
    array([1, 2, 3])
    """

    def __init__(self) -> None:
        super().__init__(Program("known").global_block())

    def emit(self, op_type: str, *args: Any, **attrs: Any) -> Any:
        """The results of an operator; names and directions of outputs have no effect."""
        definition = opdef(op_type)
        for word in ("name", "suffix", "out", "n_out"):
            attrs.pop(word, None)
        operands = [*args, *[None] * (len(definition.in_slots) - len(args))]
        made = [_wrapped(v) for v in _results(definition, operands, definition.complete_attrs(attrs))]
        return made[0] if len(made) == 1 else tuple(made)


def _results(definition: type[OpDef], operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The results of an op by slot, with the kernel that the executor would use."""
    texts = any(getattr(v, "dtype", "") == "string" for v in operands)
    if texts and definition.moves() and "string" not in definition.control.beyond_tensors:
        return _moved_texts(definition, operands, attrs)
    single, ins = len(definition.out_slots) == 1, [_part(v, "array") for v in operands]
    with np.errstate(all="ignore"):  # as in a run of the executor
        found = definition.typed(*[_part(v, "type") for v in operands], **attrs)
        types = [found] if single else list(found)
        if any(isinstance(t, TensorType) and ANY in t.shape for t in types):  # the kernel finds the sizes
            assert definition.kernel is not None
            made = definition.kernel(np, *ins, **attrs)
            return [made] if single else list(made)
        outs = [_empty(t) for t in types]
        given, memory = kernels.wide(definition, np, ins, outs)
        kernels.bind(definition, np, given, memory, attrs, RunContext())()
        return kernels.narrow(np, outs, memory)


def _moved_texts(definition: type[OpDef], operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The result of an op that only moves elements, for strings: it moves their positions in a table, where 0 is the empty string."""
    table = [""]

    def positions(v: Any) -> Any:
        if getattr(v, "dtype", "") != "string":
            return v
        start = len(table)
        table.extend(v.array.ravel().tolist())
        return HostTensor(np.arange(start, len(table)).reshape(v.shape))

    (made,) = _results(definition, [positions(v) for v in operands], attrs)
    return [np.array(table, object)[made]]


def _part(value: Any, name: str) -> Any:
    """The array or the type of an operand."""
    return [getattr(v, name) for v in value] if isinstance(value, list) else None if value is None else getattr(value, name)


def _wrapped(value: Any) -> Any:
    return [HostTensor(v) for v in value] if isinstance(value, list) else HostTensor(value)


def _empty(t: Any) -> Any:
    if isinstance(t, list):
        return [_empty(one) for one in t]
    dtype = np_dtype(t.dtype)
    return np.empty(checked_shape(t.shape, dtype.itemsize), dtype)


_dtype_name = cache(as_dtype)
