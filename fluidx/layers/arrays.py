"""Layers for arrays of variables that grow while a program runs: create_array, array_write, array_read, array_length."""

from __future__ import annotations

from typing import Any

from .._checks import wrong
from ..ir import Program, SequenceType, TensorType, Variable, as_dtype
from .helper import LayerWriter


def create_array(dtype: Any) -> Variable:
    """An empty array for `array_write`. Its first element determines the type of all elements.

    Arrays are kept on the host, so a program with one runs on one device. Gradients of a loop do not pass through arrays; carry tensors in
    a loop that is trained.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     x, i = fx.data("x", [2], "float32"), fx.layers.zeros([1], "int64")
    ...     array = fx.layers.array_write(x * 2.0, i)
    ...     array = fx.layers.array_write(x * 3.0, fx.layers.increment(i), array=array)
    ...     first, n = fx.layers.array_read(array, fx.layers.zeros([1], "int64")), fx.layers.array_length(array)
    >>> [v.tolist() for v in fx.Executor().run(main, feed={"x": np.ones(2, "float32")}, fetch_list=[first, n])]
    [[2.0, 2.0], [2]]
    """
    helper = LayerWriter("array")
    return helper.op("sequence_empty", elem=f"{TensorType(as_dtype(dtype), ())}"[:-2] + "[*]")


def array_write(x: Variable, i: Variable, array: Variable | None = None) -> Variable:
    """The array with x written at position `i`, an integer variable. A position after the last element appends; without `array` a new array
    is made."""
    helper = LayerWriter("array_write")
    x, i = helper.variable(x, "x"), helper.variable(i, "i")
    if array is None:
        array = create_array(x.dtype)
    array = _array(helper, array)
    _set_element_type(helper.main, array, x)
    # a copy of the index: a loop may change the index before the gradient reads it
    written, _ = helper.op("sequence_write", array, x, helper.op("assign", i), out={"Out": array})
    return written


def array_read(array: Variable, i: Variable) -> Variable:
    """The element of an array at position `i`, an integer variable."""
    helper = LayerWriter("array_read")
    return helper.op("sequence_at", _array(helper, array), helper.op("assign", helper.variable(i, "i")))


def array_length(array: Variable) -> Variable:
    """The number of elements of an array, int64 [1]."""
    helper = LayerWriter("array_length")
    return helper.op("reshape", helper.op("sequence_length", _array(helper, array)), shape=(1,))


def _array(helper: LayerWriter, array: Any) -> Variable:
    array = helper.variable(array, "array")
    if not isinstance(array.desc.type, SequenceType):
        raise wrong(f"{helper.label}: array must come from create_array or array_write; variable {array.name!r} is {array.desc.type}")
    return array


def _set_element_type(program: Program, array: Variable, x: Variable) -> None:
    """Set the element type of a new array to that of x, or check it."""
    declared = array.desc.type
    block = array.block
    for k, op in enumerate(block.oplist):
        if op.type == "sequence_empty" and op.output("Out") == (array.name,) and op.attrs["elem"].endswith("[*]"):
            block.oplist[k] = op.replace(attrs={**op.attrs, "elem": str(x.desc.type)})
            block.declare(array.desc.changed(type=SequenceType(x.desc.type)))
            array.stop_gradient = False
            return
    if not declared.elem.accepts(x.desc.type):
        raise wrong(f"layers.array_write: array {array.name!r} holds {declared.elem}; variable {x.name!r} is {x.desc.type}")


__all__ = ["array_length", "array_read", "array_write", "create_array"]
