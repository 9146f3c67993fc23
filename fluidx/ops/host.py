"""Ops that use the host: print, and calls of Python functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.dtypes import np_dtype
from ..ir.errors import ExecutionError, ProgramError
from ..ir.op_facets import Arithmetic, Storage
from ..ir.opdef import Effect, OpDef, Required, Sample
from ..ir.types import ANY, TensorType
from .shared.arrays import to_host


def _text(values: Any, summarize: int) -> str:
    """The elements in order, at most `summarize` of them (-1: all)."""
    flat = values.reshape(-1)
    shown = flat if summarize < 0 else flat[:summarize]
    more = ", ..." if shown.size < flat.size else ""
    return "[" + ", ".join(str(v) for v in shown.tolist()) + more + "]"


class Print(OpDef):
    """In unchanged, printed: a message, name, type, shape and the first `summarize` elements (-1: all).

    Only the first `first_n` runs print (-1: every run). With several ranks each line begins with the rank and shows its local value. The
    gradient is not printed.
    """

    name = "print"
    arithmetic = Arithmetic(flops=0)
    inputs = ("In",)
    attrs = {
        "message": "", "first_n": -1, "summarize": 20, "tensor_name": "",
        "print_tensor_name": True, "print_tensor_type": True, "print_tensor_shape": True,
    }  # fmt: skip
    effect = Effect.HOST
    storage = Storage(inplace=(("In", "Out"),))
    pattern = "* -> *"  # not linear: printing one term of a sum would show a partial value

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
        # one call, so that lines of ranks that print at the same time do not mix
        print(" ".join([*parts, _text(to_host(xp, x), summarize)]) + "\n", end="", flush=True)

    @staticmethod
    def samples():
        yield Sample.of(np.arange(15, dtype="float32").reshape(5, 3), message="values", summarize=4, tensor_name="x")
        yield Sample.of(np.arange(2, dtype="int64"), first_n=0)


# The functions that py_func calls. A program names a function by its index in this list, which other processes do not have.
FUNCTIONS: list[Any] = []


class PyFunc(OpDef):
    """Results of a Python function of the values X, which it gets whole; `function` is its index in `FUNCTIONS`.

    `shapes` holds the shapes of all results in one list, `ranks` the number of axes of each, `dtypes` their dtypes. An open size equals the
    size of Like[k], or of the first X, along the same axis. `backward` is the index of the gradient function, -1 for none. Its arguments
    are the values X without those in `skip`, the results without those in `skip_outs`, and the gradients of the results.
    """

    name = "py_func"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("X*", "Like*"), ("Out*",)
    attrs = {
        "function": Required(int), "ranks": Required(tuple), "shapes": Required(tuple), "dtypes": Required(tuple[str, ...]), "backward": -1,
        "skip": (), "skip_outs": (),
    }  # fmt: skip
    effect = Effect.HOST

    @staticmethod
    def infer(xs, like, *, ranks, shapes, dtypes, **_):
        found, at = [], 0
        for k, (rank, dtype) in enumerate(zip(ranks, dtypes, strict=True)):
            sizes = list(shapes[at : at + rank])
            at += rank
            sized_as = like[k] if like else xs[0] if xs else None
            for axis in (axis for axis, size in enumerate(sizes) if size == ANY):
                if sized_as is None or axis >= sized_as.ndim:
                    raise ProgramError(
                        f"op py_func: axis {axis} of result {k} is open, but the first input has no such open axis; give its size"
                    )
                sizes[axis] = sized_as.shape[axis]
            found.append(TensorType(dtype, tuple(sizes)))
        return found

    @staticmethod
    def grad(b, op, gs):
        xs, outs, attrs = op["X"], op["Out"], op.attrs
        if attrs["backward"] < 0:
            return [None] * len(xs), [None] * len(op["Like"])
        given = [x for k, x in enumerate(xs) if k not in attrs["skip"]] + [y for k, y in enumerate(outs) if k not in attrs["skip_outs"]]
        full = [b.fill_zeros_like(y) if g is None else g for y, g in zip(outs, gs, strict=True)]
        types = [x.desc.type for x in xs]
        made = b.py_func(
            [*given, *full], xs, n_out=len(xs), function=attrs["backward"], ranks=tuple(t.ndim for t in types),
            shapes=tuple(-1 if d < 0 else int(d) for t in types for d in t.shape), dtypes=tuple(t.dtype for t in types),
        )  # fmt: skip
        return made, [None] * len(op["Like"])

    @staticmethod
    def kernel(xp, xs, like, *, out, function, dtypes, **_):
        if function >= len(FUNCTIONS):
            raise ExecutionError(
                f"op py_func: function {function} is not known in this process, which got the program as text; run its ranks as "
                "threads, places=fx.cpu_places(n), or launch the script: fluidx run --backend processes"
            )
        made = FUNCTIONS[function](*(to_host(xp, x) for x in xs))
        values = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
        if len(values) != len(out):
            raise ExecutionError(f"op py_func: the function returned {len(values)} values for {len(out)} results")
        for k, (value, place) in enumerate(zip(values, out, strict=True)):
            array = np.asarray(value)
            if array.shape != place.shape or not np.can_cast(array.dtype, np_dtype(dtypes[k]), "same_kind"):
                raise ExecutionError(
                    f"op py_func: result {k} should be {dtypes[k]}{list(place.shape)}, "
                    f"the function returned {array.dtype}{list(array.shape)}"
                )
            place[...] = xp.asarray(array)

    @staticmethod
    def samples():
        x, why = np.arange(6, dtype="float32").reshape(2, 3), "the gradient is another Python function"
        yield Sample.of([x], [], grad=(), why=why, function=0, ranks=(2,), shapes=(-1, 3), dtypes=("float32",))


def _negative(x: Any) -> Any:
    """The function of the test sample."""
    return -np.asarray(x)


FUNCTIONS.append(_negative)
