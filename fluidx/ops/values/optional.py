"""Ops on optionals: values that may be absent (None)."""

from __future__ import annotations

import numpy as np

from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Rewrite
from ...ir.opdef import OpDef
from ...ir.types import TensorType
from ...ir.valuetypes import OptionalType, as_type
from .sequence import KINDS


class Optional(OpDef):
    """An optional that holds X; without X an empty one, with elements of the type in the text `elem`."""

    name = "optional"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
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
    """True if X holds a value, as a bool without axes; a value that is not an optional gives True."""

    name = "optional_has_element"
    rewrite = Rewrite(constant=True)
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("X?",)

    @staticmethod
    def infer(x=None):
        return TensorType("bool", ())

    @staticmethod
    def kernel(xp, x):
        return np.bool_(x is not None)


class OptionalGetElement(OpDef):
    """The value that X holds; a value that is not an optional is returned unchanged."""

    name = "optional_get_element"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
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
            raise ExecutionError("op optional_get_element: the optional is empty; ask optional_has_element first")
        return x
