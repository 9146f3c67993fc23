"""Arithmetic on one or two tensors with the broadcasting of fluid and NumPy, and the linear ops that gradients consist of."""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from ...ir import (
    Arithmetic,
    Autocast,
    Control,
    Native,
    OpDef,
    ProgramError,
    Required,
    Rewrite,
    Sample,
    Storage,
    TensorType,
    as_dtype,
    np_dtype,
)
from ...ir.dtypes import TINY, dtype_name
from .. import expr as ex
from ..expr.native import expression_calls
from ..expr.nodes import make_node, sym
from ..shared.broadcast import broadcast_sizes, reduced
from ..shared.low_bit import ROUND_MODES, converted
from ..shared.native import copy_calls
from ..shared.samples import points
from .declare import elementwise


def _pairs(low=-3.0, high=3.0, ints=True, int_low=-9):
    """Samples of a binary op: equal shapes, both kinds of broadcasting, edge sizes, other dtypes."""

    def samples():
        shapes = (
            ((3, 5), (3, 5), -1), ((2, 3, 4), (4,), -1), ((4,), (2, 3, 4), -1), ((3, 1), (1, 4), -1), ((1,), (5,), -1), ((7,), (1,), -1),
            ((2, 3, 4, 5), (3, 4), 1), ((2, 3, 4), (2,), 0), ((2, 3), (2, 1), 0), ((1,), (1,), -1), ((3, 4), (1, 1), -1),
        )  # fmt: skip
        for k, (a, b, axis) in enumerate(shapes):
            yield Sample.of(points(a, low, high, seed=k), points(b, low, high, seed=50 + k), axis=axis, tolerance=1e-2)
        yield Sample.of(points((2, 3), low, high, dtype="float64"), points((2, 3), low, high, seed=1, dtype="float64"))
        half = points((2, 3), low, high, dtype="float16"), points((3,), low, high, seed=1, dtype="float16")
        yield Sample.of(*half, grad=(), why="float16 is not accurate enough for differences")
        if ints:
            rng = np.random.default_rng(3)
            y = rng.integers(1, 5, (3, 4))
            sign = 1 if int_low >= 0 else np.where(rng.random((3, 4)) < 0.5, -1, 1)
            yield Sample.of(rng.integers(int_low, 9, (3, 4)), y * sign)
            yield Sample.of(rng.integers(int_low, 9, (3, 4)).astype("int32"), y[:1].astype("int32"))

    return samples


def _sum_to_operands(b, op, dx, dy):
    """The gradients of both operands, summed over the axes along which an operand was broadcast."""
    x, y, out = op["X"], op["Y"], op["Out"]
    return reduced(b, dx, x, out, y), reduced(b, dy, y, out, x, axis=op.attrs["axis"])


def _sub_grad(b, op, g):
    dx, dy = _sum_to_operands(b, op, g, g)
    return dx, b.scale(dy, scale=-1.0)


def _mul_grad(b, op, g):
    return _sum_to_operands(b, op, b.elementwise_mul(g, op["Y"], axis=op.attrs["axis"]), b.elementwise_mul(g, op["X"]))


def _int_div(xp, ins, out, attrs):
    """C's integer division, which rounds towards zero, as fluid and ONNX define it; NumPy only has the one that rounds down."""
    if out.dtype.kind not in "iu":
        return None
    x, y = ins

    def divide():
        xp.floor_divide(x, y, out=out)
        rest = xp.remainder(x, y)
        xp.add(out, (rest != 0) & ((x < 0) != (y < 0)), out=out, casting="unsafe")

    def divide_safely():  # for a result in the memory of an operand
        q = xp.floor_divide(x, y)
        q += (xp.remainder(x, y) != 0) & ((x < 0) != (y < 0))
        out[...] = q

    return divide_safely if any(np.may_share_memory(a, out) for a in ins) else divide


elementwise("elementwise_add", lambda x, y: x + y, axis=True, dtypes="number", mixed="any", samples=_pairs(),
    grad=lambda b, op, g: _sum_to_operands(b, op, g, g),
    doc="The sum of two tensors.\n\nTwo partial sums add up; the verifier refuses a partial sum with a whole value.")  # fmt: skip
elementwise("elementwise_sub", lambda x, y: x - y, axis=True, dtypes="number", mixed="any", samples=_pairs(),
    grad=_sub_grad, doc="The difference of two tensors.")  # fmt: skip
elementwise("elementwise_mul", lambda x, y: x * y, axis=True, dtypes="number", mixed="any", samples=_pairs(),
    grad=_mul_grad, doc="The elementwise product of two tensors.")  # fmt: skip
elementwise("elementwise_div", lambda x, y: x / y, axis=True, dtypes="number", mixed="any", samples=_pairs(0.5, 2.0),
    special=_int_div, doc="The quotient of two tensors. Integers are divided towards zero, as in C.")  # fmt: skip
elementwise("elementwise_max", lambda x, y: ex.max(x, y), axis=True, dtypes="number", mixed="any", samples=_pairs(),
    doc="The larger of two tensors, element by element. At a tie the gradient goes to Y.")  # fmt: skip
elementwise("elementwise_min", lambda x, y: ex.min(x, y), axis=True, dtypes="number", mixed="any", samples=_pairs(),
    doc="The smaller of two tensors, element by element. At a tie the gradient goes to Y.")  # fmt: skip


def _int_pow(xp, ins, out, attrs):
    """Powers of integers. NumPy refuses negative exponents: such powers are rounded towards zero, so only those of 1 and -1 are not 0."""
    if out.dtype.kind not in "iu":
        return None
    x, y = ins
    return lambda: _assign(out, xp.where(y < 0, xp.where(xp.abs(x) == 1, xp.power(x, y & 1), 0), xp.power(x, xp.maximum(y, 0))))


def _pow_samples():
    yield from _pairs(0.5, 2.0, int_low=0, ints=False)()
    for dtype in ("int64", "int32"):
        yield Sample.of(np.array([[-3, -1, 0, 1, 2, 5]], dtype), np.array([[-2], [-1], [0], [3]], dtype))


elementwise("elementwise_pow", lambda x, y: x**y, axis=True, dtypes="number", samples=_pow_samples, special=_int_pow,
    doc="X to the power of Y, element by element. For integers, powers with negative exponents are rounded towards zero.")  # fmt: skip


def _mod_samples():
    for s in _pairs(0.5, 2.0)():
        yield Sample(s.args, s.attrs, grad=(), why="X mod Y jumps, and differences across a jump are meaningless")
    for low in (0.2, 1.6, -0.9):  # X / Y stays between two integers
        yield Sample.of(points((2, 3), low, low + 0.3), points((3,), 1.1, 1.5, seed=1))


elementwise("elementwise_mod", lambda x, y: x % y, axis=True, dtypes="number", samples=_mod_samples,
    doc="The remainder of X / Y, with the sign of Y. For integers, layers write elementwise_fmod, as fluid 1.8 computes.")  # fmt: skip
elementwise("elementwise_fmod", lambda x, y: ex.fmod(x, y), axis=True, dtypes="number", samples=_mod_samples,
    doc="The remainder of X / Y rounded towards zero, with the sign of X.")  # fmt: skip
elementwise("elementwise_floordiv", lambda x, y: x // y, axis=True, dtypes="number", samples=_mod_samples,
    doc="X / Y rounded down. For integers, layers write elementwise_div, as fluid 1.8 rounds towards zero.")  # fmt: skip


# -- affine ops and clipping ------------------------------------------------------------------------------------------------------


def _scale_grad(b, op, g):
    return g if op.attrs["scale"] == 1.0 else b.scale(g, scale=op.attrs["scale"])


def _scale_int(xp, ins, out, attrs):
    """Integers times a fraction: computed in float64, then rounded towards zero."""
    if out.dtype.kind not in "iu" or all(float(attrs[k]).is_integer() for k in ("scale", "bias")):
        return None
    (x,), s, c = ins, attrs["scale"], attrs["bias"]
    after = attrs["bias_after_scale"]
    return lambda: _assign(out, x * s + c if after else (x + c) * s)


def _assign(out, value):
    out[...] = value.astype(out.dtype)


elementwise("scale", lambda x, *, scale, bias, bias_after_scale: ex.where(bias_after_scale, scale * x + bias, scale * (x + bias)),
    attrs={"scale": 1.0, "bias": 0.0, "bias_after_scale": True}, dtypes="number", mixed="any", grad=_scale_grad, special=_scale_int,
    variants=({}, {"scale": 2.5, "bias": 0.5}, {"scale": -1.0}, {"bias": 1.5}, {"scale": 3.0, "bias": 1.0, "bias_after_scale": False}),
    doc="scale * X + bias, or scale * (X + bias) when `bias_after_scale` is off.")  # fmt: skip
elementwise("clip", lambda x, *, min, max: ex.min(ex.max(x, min), max), attrs={"min": Required(float), "max": Required(float)},
    dtypes="number", mixed="any", kinks=(-1.0, 1.0), variants=({"min": -1.0, "max": 1.0}, {"min": -10.0, "max": 1.0}),
    doc="X clipped to [min, max].")  # fmt: skip
elementwise("increment", lambda x, *, step: x + step, attrs={"step": 1.0}, dtypes="number", variants=({}, {"step": -2.0}),
    doc="X + step, for loop counters. In fluid programs the result is written into X itself.")  # fmt: skip
elementwise("pow", lambda x, *, factor: x**factor, attrs={"factor": 1.0}, domain=(0.5, 2.0),
    variants=({}, {"factor": 2.0}, {"factor": 3.0}, {"factor": 0.5}, {"factor": -1.5}, {"factor": 0.0}),
    doc="X to the power of the attribute `factor`.")  # fmt: skip


class Sum(OpDef):
    """The sum of n tensors of one shape, added from first to last; 16-bit floats are added in float32.

    If several operators contribute to one gradient, this op adds the contributions. Raises ProgramError without any X, or if dtypes or
    shapes differ.
    """

    name = "sum"
    rewrite = Rewrite(identity_if=lambda x, attrs, count: count == 1, folds="sum", meaning=lambda a, ins, outs: [a.sum(ins[0])])
    inputs = ("X*",)
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def pattern(ins, outs, attrs):
        words = ", ".join("*" for _ in ins)
        return f"{words} -> *" + (f" | L({','.join(map(str, range(len(ins))))})" if outs[0].dtype != "bool" else "")

    @staticmethod
    def _flops(ins, outs, attrs):
        return (len(ins) - 1) * outs[0].numel

    arithmetic = Arithmetic(flops=_flops)

    @staticmethod
    def infer(xs):
        if not xs:
            raise ProgramError("op sum: expected at least one X, found none")
        out = xs[0]
        for k, x in enumerate(xs[1:], 1):
            if x.dtype != out.dtype or len(x.shape) != len(out.shape) or not out.accepts(x):
                raise ProgramError(f"op sum: expected terms of one dtype and shape, found {out} and, as term {k}, {x}")
            out = TensorType(out.dtype, broadcast_sizes("sum", out.shape, x.shape))
        return out

    @staticmethod
    def grad(b, op, g):
        return [g] * len(op["X"])

    @staticmethod
    def kernel(xp, xs, *, out):
        if len(xs) > 2 and out.dtype.itemsize == 2 and out.dtype.kind not in "iu":
            out[...] = sum((x.astype("float32") for x in xs[1:]), xs[0].astype("float32"))
            return
        if any(xp.may_share_memory(a, out) for a in xs[2:]):
            out[...] = sum(xs[1:], xs[0])
            return
        if len(xs) == 1:
            xp.copyto(out, xs[0])
            return
        xp.add(xs[0], xs[1], out)
        for x in xs[2:]:
            xp.add(out, x, out)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        xs, out = ins[0], outs[0]
        if len(xs) == 1:
            return copy_calls(out, xs[0], dry)
        terms = {f"x{k}": x for k, x in enumerate(xs)}
        return expression_calls(reduce(partial(make_node, "add"), map(sym, terms)), terms, out, dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of([points((2, 3), seed=k) for k in range(3)])
        yield Sample.of([points((2, 3)), points((2, 3), seed=1)])
        yield Sample.of([points((1,))])
        yield Sample.of([np.arange(4), np.arange(4), np.arange(4)])


class Cast(OpDef):
    """X in another dtype. Floats become integers by rounding towards zero, and bools by comparison with 0.

    Numbers become 8-bit floats by rounding to even. A number that is too large becomes the largest one, or infinity or NaN without
    `saturate`. float8_e8m0fnu has powers of two only: `round_mode` is up, down or nearest. Integers become 4-bit and 2-bit integers by
    keeping their lowest bits.
    """

    name = "cast"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    rewrite = Rewrite(identity_if=lambda x, attrs, count: True)
    inputs = ("X",)
    attrs = {"dtype": Required(str), "saturate": True, "round_mode": "up"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, out = ins[0], outs[0]
        # partial sums rounded one by one do not add up to the rounded sum, and integers wrap around
        if {x.dtype, out.dtype} & {*TINY}:
            return "* -> *"
        widens = np.promote_types(np_dtype(x.dtype), np_dtype(out.dtype)) == np_dtype(out.dtype)
        linear = widens and x.is_float and out.is_float
        return "* -> * |" + (" L(0)" if linear else "") + (" U(0)" if widens or x.is_float and out.is_float else "")

    @staticmethod
    def infer(x, *, dtype, saturate, round_mode):
        if round_mode not in ROUND_MODES:
            raise ProgramError(f"op cast: round_mode must be up, down or nearest, found {round_mode!r}")
        return x.with_dtype(as_dtype(dtype))

    @staticmethod
    def grad(b, op, g):
        return b.cast(g, dtype=op["X"].dtype)

    @staticmethod
    def kernel(xp, x, *, out, dtype, saturate, round_mode):
        if dtype_name(x.dtype) in TINY or dtype_name(out.dtype) in TINY:
            out[...] = converted(x, out.dtype, saturate, round_mode)
        else:
            xp.copyto(out, x, casting="unsafe")

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return copy_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        x = points((3, 4))
        yield Sample.of(x, dtype="float64", tolerance=1e-2)
        yield Sample.of(x.astype("float64"), dtype="float32")
        for dtype in ("int32", "int64", "bool", "float16", "bfloat16"):
            yield Sample.of(x, dtype=dtype, grad=(), why="not accurate enough for differences")
        yield Sample.of(np.arange(7), dtype="float32")
        yield Sample.of(x.astype(np_dtype("bfloat16")), dtype="float32", grad=(), why="not accurate enough for differences")
        yield Sample.of(x[:1] > 0, dtype="int8")


class Assign(OpDef):
    """A copy of X in another variable."""

    name = "assign"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("sequence", "optional", "map", "string"))
    rewrite = Rewrite(identity_if=lambda x, attrs, count: True, meaning=lambda a, ins, outs: [ins[0]])
    inputs = ("X",)
    storage = Storage(inplace=(("X", "Out"),))
    pattern = staticmethod(lambda ins, outs, attrs: "* -> * | U(0)" + (" L(0)" if ins[0].dtype != "bool" else ""))

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def grad(b, op, g):
        return g

    @staticmethod
    def kernel(xp, x, *, out):
        xp.copyto(out, x)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        return copy_calls(outs[0], ins[0], dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(points((3, 4)))
        yield Sample.of(np.arange(5))
        yield Sample.of(points((1,)))
        yield Sample.of(points((7,)) > 0)
