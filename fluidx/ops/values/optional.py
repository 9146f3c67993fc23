"""Ops on optionals: a value, or nothing, which is None."""

from __future__ import annotations

import numpy as np

from ...ir.errors import ExecutionError, ProgramError
from ...ir.opdef import OpDef
from ...ir.types import TensorType
from ...ir.valuetypes import OptionalType, as_type
from .sequence import KINDS


class Optional(OpDef):
    """An optional that holds X; one that holds nothing, of the type that the text `elem` is, where X is left out."""

    name = "optional"
    flops, takes_low_bit, beyond_tensors = 0, True, KINDS
    inputs = ("X?",)
    attrs = {"elem": ""}

    @staticmethod
    def infer(x=None, *, elem):
        if x is None and not elem:
            raise ProgramError('op optional is empty: give its type: elem="f32[4]"')
        return OptionalType(as_type(elem) if x is None else x)

    @staticmethod
    def grad(b, op, g):
        return b.optional_get_element(g)

    @staticmethod
    def kernel(xp, x, *, elem):
        return x


class OptionalHasElement(OpDef):
    """Whether X holds something, a bool without axes; what is no optional does."""

    name = "optional_has_element"
    flops, constant, takes_low_bit, beyond_tensors = 0, True, True, KINDS
    inputs = ("X?",)

    @staticmethod
    def infer(x=None):
        return TensorType("bool", ())

    @staticmethod
    def kernel(xp, x):
        return np.bool_(x is not None)


class OptionalGetElement(OpDef):
    """What X holds; what is no optional is its own element."""

    name = "optional_get_element"
    flops, takes_low_bit, beyond_tensors = 0, True, KINDS
    inputs = ("X",)

    @staticmethod
    def infer(x):
        return x.elem if isinstance(x, OptionalType) else x

    @staticmethod
    def grad(b, op, g):
        return b.optional(g) if isinstance(op["X"].desc.type, OptionalType) else g

    @staticmethod
    def kernel(xp, x):
        if x is None:
            raise ExecutionError("op optional_get_element: the optional holds nothing; ask optional_has_element first")
        return x
