"""Known values of an import as variables of the program: constants, parameters and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..initializer import NumpyArrayInitializer
from ..ir import ProgramError, Variable
from ..ir.constants import elements
from ..ir.dtypes import as_dtype
from ..ir.valuetypes import OptionalType, SequenceType
from .types import value_type
from .values import ABSENT, FrozenPart, Weight, fits_program, in_float, is_string_array

if TYPE_CHECKING:
    from .importer import Importer
    from .value_reader import ValueReader

_SMALL = 64  # elements. Smaller constants are operators of the program; larger ones are state variables that startup fills.


def constant(importer: ValueReader, value: Any) -> Variable:
    """A known value as a variable: the result of an operator, a parameter, or a state variable. Raises ProgramError for a value that a
    program cannot hold."""
    if isinstance(value, list):
        return _sequence(importer, value)
    array, b = importer.array(value), importer.b
    if is_string_array(array):
        return b.fill_string(shape=array.shape, values=tuple(array.ravel().tolist()))
    if not fits_program(array):
        found = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ProgramError(f"a program cannot hold {found}")
    if isinstance(value, Weight):
        return parameter(importer, value)
    dtype = as_dtype(array.dtype)
    if array.size == 0 or (array.size <= _SMALL and (array == array.flat[0]).all() and in_float(array.flat[0])):
        return b.fill_constant(shape=array.shape, dtype=dtype, value=float(array.flat[0]) if array.size else 0.0)
    if array.size <= _SMALL:
        return b.assign_value(shape=array.shape, dtype=dtype, values=elements(array, dtype))
    name = importer.fresh("constant")
    for program in (importer.main, importer.startup):
        program.global_block().create_var(name, array.shape, dtype, persistable=True, stop_gradient=True)
    made = importer.main.global_block().var(name)
    NumpyArrayInitializer(array)(made, importer.startup.global_block())
    return made


def parameter(importer: ValueReader, weight: Weight | FrozenPart, shape: Sequence[int] | None = None) -> Variable:
    """A parameter with the values of a weight, or of a part of a quantized one, which is not trained."""
    array, name = weight.array if shape is None else weight.array.reshape(shape), importer.fresh(weight.name)
    blocks = importer.main.global_block(), importer.startup.global_block()
    made, _ = (b.create_parameter(array.shape, as_dtype(array.dtype), name, isinstance(weight, Weight)) for b in blocks)
    NumpyArrayInitializer(array)(made, blocks[1])
    return made


def _sequence(importer: ValueReader, values: list[Any], name: str | None = None) -> Variable:
    if not values:
        raise ProgramError("the sequence is empty, and the type of its elements is not given")
    return importer.b.sequence_construct([importer.variable(v) for v in values], name=name)


def block_output(importer: Importer, value: Any, info: Any) -> Variable:
    """The variable for an output of a block. An optional or a sequence has the type that the graph declares."""
    t = value_type(info.type) if info.type.WhichOneof("value") in ("optional_type", "sequence_type") else None
    if value is ABSENT and isinstance(t, OptionalType):
        return importer.b.optional(elem=str(t.elem))
    if isinstance(value, list) and not value and isinstance(t, SequenceType):
        return importer.b.sequence_empty(elem=str(t.elem))
    made = importer.variable(value)
    return importer.b.optional(made) if isinstance(t, OptionalType) and not isinstance(made.desc.type, OptionalType) else made


def output(importer: Importer, info: Any) -> Variable:
    """The variable of an output of the model. An empty optional has the type that the model declares."""
    value, name, b = importer.lookup(info.name), importer.fresh(info.name), importer.b
    if value is ABSENT and isinstance(t := value_type(info.type), OptionalType):
        return b.optional(elem=str(t.elem), name=name)
    if not isinstance(value, list):
        return importer.variable(value)
    if not value and isinstance(t := value_type(info.type), SequenceType):
        return b.sequence_empty(elem=str(t.elem), name=name)
    return _sequence(importer, value, name)
