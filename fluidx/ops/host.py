"""Ops that reach out of the program to the host: print."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.opdef import Effect, OpDef, Sample
from ..ir.types import TensorType
from .shared.arrays import to_host


def _text(values: Any, summarize: int) -> str:
    """The elements in order, at most `summarize` of them (-1: all)."""
    flat = values.reshape(-1)
    shown = flat if summarize < 0 else flat[:summarize]
    more = ", ..." if shown.size < flat.size else ""
    return "[" + ", ".join(str(v) for v in shown.tolist()) + more + "]"


class Print(OpDef):
    """In as it is, printed on the way: a message, name, type, shape and the first `summarize` elements (-1: all).

    Only the first `first_n` runs print (-1: every one). With several ranks each line begins with the rank, and shows that rank's part.
    The gradient passes through unprinted.
    """

    name = "print"
    flops = 0
    inputs = ("In",)
    attrs = {
        "message": "", "first_n": -1, "summarize": 20, "tensor_name": "",
        "print_tensor_name": True, "print_tensor_type": True, "print_tensor_shape": True,
    }  # fmt: skip
    effect = Effect.HOST
    inplace = (("In", "Out"),)
    pattern = "* -> *"  # not linear: a term of a sum is no value to show

    @staticmethod
    def infer(x, **attrs):
        return x

    @staticmethod
    def grad(b, op, g):
        return g

    @staticmethod
    def kernel(xp, x, *, out, ctx, message, first_n, summarize, tensor_name, print_tensor_name, print_tensor_type, print_tensor_shape):
        if out is not x:
            out[...] = x
        if 0 <= first_n <= ctx.step:
            return
        parts = [f"[rank {ctx.rank}]"] if ctx.world_size > 1 else []
        if message:
            parts.append(message)
        if print_tensor_name and tensor_name:
            parts.append(tensor_name)
        type_ = str(TensorType(x.dtype.name, tuple(x.shape)))
        if print_tensor_type and print_tensor_shape:
            parts.append(type_)
        elif print_tensor_type or print_tensor_shape:
            short, _, shape = type_.partition("[")
            parts.append(short if print_tensor_type else f"[{shape}")
        # one call, so that the lines of ranks that print at once do not mix
        print(" ".join([*parts, _text(to_host(xp, x), summarize)]) + "\n", end="", flush=True)

    @staticmethod
    def samples():
        yield Sample.of(np.arange(15, dtype="float32").reshape(5, 3), message="values", summarize=4, tensor_name="x")
        yield Sample.of(np.arange(2, dtype="int64"), first_n=0)
