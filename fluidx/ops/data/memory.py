"""Copies between the two memories of a rank: device memory and host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.op_facets import Arithmetic, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Sample
from ..shared.arrays import copy_across
from ..shared.native import copy_calls
from ..shared.samples import points


class _Copy(OpDef):
    """Base of both copy operators."""

    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    pattern = staticmethod(lambda ins, outs, attrs: "* -> * | U(0)" + (" L(0)" if ins[0].dtype != "bool" else ""))
    rewrite = Rewrite(meaning=lambda a, ins, outs: [ins[0]])

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any) -> None:
        copy_across(xp, out, x)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return copy_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(points((3, 4)))
        yield Sample.of(np.arange(5))
        yield Sample.of(points((7,)) > 0)


class ToHost(_Copy):
    """A copy of X, which is in device memory, in host memory. On a CPU both are the same memory."""

    name = "memcpy_d2h"
    storage = Storage(copies_to="host")

    @staticmethod
    def grad(b, op, g):
        return b.memcpy_h2d(g)


class ToDevice(_Copy):
    """A copy of X, which is in host memory, in device memory. On a CPU both are the same memory."""

    name = "memcpy_h2d"
    storage = Storage(copies_to="device")

    @staticmethod
    def grad(b, op, g):
        return b.memcpy_d2h(g)
