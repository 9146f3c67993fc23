"""Values of scalar expressions on arrays: computed node by node (`evaluate`), or by a prebound sequence of NumPy ufunc calls
(`bind_ufuncs`).

The sequence writes into one output, reuses its scratch memory and cuts large tensors into blocks that stay in cache. An expression that is
one ufunc becomes that ufunc alone. Functions that NumPy lacks (erf, sigmoid, ...) are expressed by others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ...ir.dtypes import dtype_name, np_dtype
from ...ir.errors import ProgramError
from ...ir.types import TensorType
from ..shared.call_sequence import in_order
from . import nodes as ex
from .nodes import BOOLEAN, Expr, const, exp, is_const, log1p, make_node, nodes, number_of, sqrt, symbols, where

# -- evaluation node by node: the meaning of an expression, on NumPy or CuPy arrays --------------------------------------------------------


_UFUNC = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "pow": "power", "mod": "remainder",
    "floordiv": "floor_divide", "exp": "exp", "log": "log", "log1p": "log1p", "sqrt": "sqrt", "tanh": "tanh", "sin": "sin", "cos": "cos",
    "tan": "tan", "sinh": "sinh", "cosh": "cosh", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh",
    "acosh": "arccosh", "atanh": "arctanh", "fmod": "fmod", "bit_and": "bitwise_and", "bit_or": "bitwise_or", "bit_xor": "bitwise_xor",
    "bit_not": "invert", "shift_left": "left_shift", "shift_right": "right_shift", "abs": "absolute", "sign": "sign", "floor": "floor",
    "ceil": "ceil", "round": "rint", "min": "minimum", "max": "maximum", "gt": "greater", "ge": "greater_equal", "lt": "less",
    "le": "less_equal", "eq": "equal", "ne": "not_equal", "and": "logical_and", "or": "logical_or", "xor": "logical_xor",
    "not": "logical_not", "isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite", "_xor": "bitwise_xor", "_and": "bitwise_and",
    "_mulb": "multiply",
}  # fmt: skip


def evaluate(e: Expr, xp: Any, values: Mapping[str, Any]) -> Any:
    """The value of `e` for the arrays and numbers in `values`: slow and simple, the same for numpy and cupy.

    >>> evaluate(ex.trace(lambda x: x * x + 1), np, {"x": np.array([1.0, 2.0])})
    array([2., 5.])
    """
    arrays = [v for v in values.values() if hasattr(v, "dtype") and v.dtype != bool]
    order = _in_order(e, dtype_name(arrays[0].dtype) if arrays else "float64")
    got: dict[Expr, Any] = {}
    for n in order:
        if n.fn == "const":
            got[n] = n.args[0]
        elif n.fn == "sym":
            got[n] = values[n.args[0]]
        elif n.fn == "where":
            got[n] = xp.where(*(got[a] for a in n.args))
        else:
            got[n] = getattr(xp, _UFUNC[n.fn])(*(got[a] for a in n.args))
    return got[order[-1]]


@lru_cache(maxsize=1024)
def _in_order(e: Expr, dtype: str) -> tuple[Expr, ...]:
    """The nodes of `e` in terms of ufuncs, arguments before the functions of them."""
    return tuple(nodes(_lower(e, dtype, select=False)))


# -- lowering to ufuncs --------------------------------------------------------------------------------------------------------------


# erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.925, where erf rounds to 1 in float32. P and Q are a minimax fit of the relative error
# (Lawson's reweighted least squares over Chebyshev points, after Cody, "A survey of practical rational and polynomial
# approximation of functions", SIAM Review 12, 1970): 2e-8 in exact arithmetic, 5e-7 with the rounding of float32.
_ERF32_P = (1.128379146, 0.1905945038, 0.05276934191, 0.003772566839, 0.0002848414211, 2.04599006e-06)
_ERF32_Q = (1.0, 0.5022427117, 0.114182981, 0.01498323351, 0.001163857139, 3.804727415e-05)

# float64: W. J. Cody, "Rational Chebyshev approximations for the error function", Mathematics of Computation 23 (1969) 631-637, with the
# coefficients of his program CALERF: x R(x^2) up to 0.46875, 1 - exp(-x^2) S(x) above. The third interval (x > 4) only matters for erfc:
# there erf differs from 1 by less than 2e-8, which S gives to more digits than float64 stores.
_CODY_A = (3.20937758913846947e03, 3.77485237685302021e02, 1.13864154151050156e02, 3.16112374387056560e00, 1.85777706184603153e-1)
_CODY_B = (2.84423683343917062e03, 1.28261652607737228e03, 2.44024637934444173e02, 2.36012909523441209e01, 1.0)
_CODY_C = (1.23033935479799725e03, 2.05107837782607147e03, 1.71204761263407058e03, 8.81952221241769090e02, 2.98635138197400131e02,
           6.61191906371416295e01, 8.88314979438837594e00, 5.64188496988670089e-1, 2.15311535474403846e-8)  # fmt: skip
_CODY_D = (1.23033935480374942e03, 3.43936767414372164e03, 4.36261909014324716e03, 3.29079923573345963e03, 1.62138957456669019e03,
           5.37181101862009858e02, 1.17693950891312499e02, 1.57449261107098347e01, 1.0)  # fmt: skip


def _horner(coefficients: Sequence[float], x: Expr) -> Expr:
    total = const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _erf32(x: Expr) -> Expr:
    y = ex.max(ex.min(x, 3.925), -3.925)
    s = y * y
    return ex.max(ex.min(y * _horner(_ERF32_P, s) / _horner(_ERF32_Q, s), 1.0), -1.0)  # 1 + erf must not be below 0


def _erf64(x: Expr) -> Expr:
    y = ex.min(ex.abs(x), 6.0)
    s = ex.min(y * y, 0.25)
    small = x * _horner(_CODY_A, s) / _horner(_CODY_B, s)
    large = 1.0 - exp(-(y * y)) * (_horner(_CODY_C, y) / _horner(_CODY_D, y))
    return where(y < 0.46875, small, ex.sign(x) * large)


def _lower(e: Expr, dtype: str, select: bool) -> Expr:
    """`e` in terms of ufuncs. With `select`, `where` becomes bit masks: NumPy's masked copies mispredict a branch per element and cost 5 to
    15 times an addition, while three bitwise passes cost three.
    """
    new: dict[Expr, Expr] = {}
    for n in nodes(e):
        args = () if n.fn in ("const", "sym") else tuple(new[a] for a in n.args)
        new[n] = _lower_node(n, args, dtype, select)
    return new[e]


def _lower_node(n: Expr, args: tuple[Expr, ...], dtype: str, select: bool) -> Expr:
    match n.fn:
        case "const" | "sym":
            return n
        case "sigmoid":
            e = exp(make_node("neg", ex.abs(args[0])))  # between 0 and 1, so nothing overflows; the numerator is e or 1
            choice = args[0] >= 0, const(1.0), const(0.0)
            one = _lower_node(make_node("where", *choice), choice, dtype, select)
            return make_node("div", make_node("max", e, one), make_node("add", const(1.0), e))
        case "softplus":
            return make_node("add", make_node("max", args[0], const(0.0)), log1p(exp(make_node("neg", ex.abs(args[0])))))
        case "rsqrt":
            return make_node("div", const(1.0), sqrt(args[0]))
        case "erf":
            return _lower(_erf64(args[0]) if dtype == "float64" else _erf32(args[0]), dtype, select)
        case "mul" if select:
            for mask, other in (args, args[::-1]):
                if mask.fn == "_mask":
                    return make_node("_mulb", other, mask.args[0])
        case "where" if select:
            return _lower_where(*args)
    return n if args == n.args else make_node(n.fn, *args)


def _lower_where(c: Expr, a: Expr, b: Expr) -> Expr:
    """where(c, a, b) as bitwise operations."""
    # where(x > 0, x, k * x) with 0 < k <= 1 is ex.max(x, k * x)
    if c.fn in ("gt", "ge") and is_const(c.args[1], 0) and a is c.args[0] and b.fn == "mul" and b.args[1] is a:
        if 0 < (number_of(b.args[0]) or 0) <= 1:
            return make_node("max", a, b)
    if c.fn not in BOOLEAN:
        c = make_node("ne", c, const(0))
    if is_const(a, 1) and is_const(b, 0):
        return make_node("_mask", c)
    if is_const(b, 0):
        return make_node("_and", a, make_node("_bits", c))
    if is_const(a, 0):
        return make_node("_and", b, make_node("_bits", make_node("not", c)))
    return make_node("_xor", make_node("_and", make_node("_xor", a, b), make_node("_bits", c)), b)


_INT_VIEW = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
BLOCK = 32768  # number of elements of a block: its operands and scratch memory stay in the L2 cache


@lru_cache(maxsize=1024)
def _steps(e: Expr, dtype: str) -> list[tuple[str, tuple[Any, ...], str]]:
    """The lowered expression as (function, operands, dtype of the result).

    An operand is ("in", name), ("const", value) or ("tmp", step number).
    """
    lowered = _lower(e, dtype, select=True)
    inner = [n for n in nodes(lowered) if n.fn not in ("const", "sym")]
    number = {n: i for i, n in enumerate(inner)}
    steps = []
    for n in inner:
        operands = tuple(
            ("tmp", number[a]) if a in number else ("in", a.args[0]) if a.fn == "sym" else ("const", a.args[0]) for a in n.args
        )
        steps.append((n.fn, operands, "bool" if n.fn in BOOLEAN else "int8" if n.fn == "_bits" else dtype))
    if not steps:
        steps.append(("_copy", (("in", lowered.args[0]) if lowered.fn == "sym" else ("const", lowered.args[0]),), dtype))
    return steps


def _copy_into(out: np.ndarray, value: Any) -> Callable[[], Any]:
    return partial(np.copyto, out, value, casting="unsafe")


def bind_ufuncs(e: Expr, values: Mapping[str, np.ndarray], out: np.ndarray, scratch: Sequence[np.ndarray] = ()) -> Callable[[], Any]:
    """A call without arguments that computes `e` from the arrays in `values` into `out`; all memory is allocated now.

    `values` holds the arrays of all symbols in `e`; they broadcast to `out`. `out` may be one of them. The numeric arrays have one dtype.
    `scratch` holds arrays of the types that `ufunc_scratch` returns.
    """
    ins = {n: values[n] for n in symbols(e)}
    steps = _steps(e, _dtype_of([dtype_name(a.dtype) for a in ins.values()], dtype_name(out.dtype)))
    pool: _Pool = {}
    for a in scratch:
        pool.setdefault((a.shape, a.dtype), []).append(a)
    flat = out.size > BLOCK and out.flags.c_contiguous
    flat = flat and len(steps) > 1 and all(a.size == 1 or (a.shape == out.shape and a.flags.c_contiguous) for a in ins.values())
    if not flat:
        return in_order(_bind_block(steps, ins, out, pool))
    calls: list[Callable[[], Any]] = []
    ins = {n: a.reshape(()) if a.size == 1 else a.reshape(-1) for n, a in ins.items()}
    line = out.reshape(-1)
    for start in range(0, line.size, BLOCK):
        part = slice(start, start + BLOCK)
        if (rest := line.size - start) < BLOCK:
            pool = {(shape and (rest,), dtype): [a[:rest] if shape else a for a in some] for (shape, dtype), some in pool.items()}
        calls += _bind_block(steps, {n: a if a.ndim == 0 else a[part] for n, a in ins.items()}, line[part], pool)
    return in_order(calls)


_Pool = dict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]]


def _dtype_of(ins: Sequence[str], out: str) -> str:
    """The dtype of the computation: that of the numeric operands, or of the result if all operands are bool."""
    return next((d for d in ins if d != "bool"), out)


@lru_cache(maxsize=4096)
def ufunc_scratch(e: Expr, types: tuple[TensorType, ...], out: TensorType) -> tuple[TensorType, ...]:
    """Types of the scratch arrays that `bind_ufuncs` needs for `e` wherever `out` is stored; `types` are those of the symbols of `e`, in
    order.
    """
    steps = _steps(e, _dtype_of([t.dtype for t in types], out.dtype))
    if out.numel > BLOCK and len(steps) > 1 and all(t.numel == 1 or t.shape == out.shape for t in types):
        types = tuple([t.with_shape(() if t.numel == 1 else (BLOCK,)) for t in types])
        out = out.with_shape((BLOCK,))
    pool: _Pool = {}
    _bind_block(steps, dict(zip(symbols(e), map(_shadow, types), strict=True)), _shadow(out), pool, dry=True)
    return tuple([TensorType(dtype.name, shape) for (shape, dtype), arrays in pool.items() for _ in arrays])


def _shadow(t: TensorType) -> np.ndarray:
    return _shape_only(t.shape, np_dtype(t.dtype))


def _shape_only(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array with the given shape that uses the memory of one element."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _bind_block(steps: Any, ins: Mapping[str, np.ndarray], out: np.ndarray, pool: _Pool, dry: bool = False) -> list[Callable[[], Any]]:
    """One call per step. Scratch arrays come from `pool` and return to it. `out` serves as scratch after the last read of an input that
    shares its memory. `dry`: only the final content of `pool` matters; any input may then share the memory of `out`."""
    calls: list[Callable[[], Any]] = []
    last = {o: i for i, (_, operands, _) in enumerate(steps) for o in operands}
    scratch = _Scratch(pool, out, _shape_only if dry else np.empty)
    aliases = [n for n, a in ins.items() if dry or np.may_share_memory(a, out)]
    out_free_after = max((last.get(("in", n), -1) for n in aliases), default=-1)
    spare_out = True
    values: list[np.ndarray] = []
    for i, (fn, operands, dtype) in enumerate(steps):
        args = [ins[v] if kind == "in" else values[v] if kind == "tmp" else v for kind, v in operands]
        if i < len(steps) - 1 and all(kind == "const" for kind, _ in operands):
            values.append(np.empty((), np_dtype(dtype)))  # a step on constants only is computed now
            _bind_step(fn, args, values[-1])()
            continue
        if spare_out and i > out_free_after:
            spare_out = False
            scratch.release(out)
        for kind, v in set(operands):
            if kind == "tmp" and last[kind, v] == i:
                scratch.release(values[v])
        final = i == len(steps) - 1 and out.dtype == np_dtype(dtype)
        target = out if final else scratch.take(np.broadcast_shapes(*(np.shape(a) for a in args)), np_dtype(dtype))
        values.append(target)
        calls.append(_bind_step(fn, args, target))
    if values[-1] is not out:
        calls.append(_copy_into(out, values[-1]))
    scratch.keep_in(pool)
    return calls


class _Scratch:
    """The free arrays of one block, by shape and dtype: those of a pool, those that the block allocates, and its output."""

    def __init__(self, pool: _Pool, out: np.ndarray, allocate: Callable[..., np.ndarray]):
        self.free = {key: list(arrays) for key, arrays in pool.items()}
        self.taken: list[np.ndarray] = []
        self.out, self.allocate = out, allocate

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        ready = self.free.get((shape, dtype))
        a = ready.pop() if ready else self.allocate(shape, dtype)
        if a is not self.out and not _among(a, self.taken):
            self.taken.append(a)
        return a

    def release(self, a: np.ndarray) -> None:
        """Make an array free again, if it is scratch."""
        if a is self.out or _among(a, self.taken):
            self.free.setdefault((a.shape, a.dtype), []).append(a)

    def keep_in(self, pool: _Pool) -> None:
        """Add the arrays of the block to the pool."""
        for a in self.taken:
            have = pool.setdefault((a.shape, a.dtype), [])
            if not _among(a, have):
                have.append(a)


def _among(a: np.ndarray, arrays: Sequence[np.ndarray]) -> bool:
    return any(a is b for b in arrays)


def _bind_step(fn: str, args: list[Any], out: Any) -> Callable[[], Any]:
    if fn == "_copy" or fn == "_mask":
        return _copy_into(out, args[0])
    if fn == "_bits":  # False, True -> 0, -1: the condition as a bit mask
        return partial(np.negative, args[0].view(np.int8), out)
    kind = out.dtype if fn in ("_xor", "_and") else next((a.dtype for a in args if isinstance(a, np.ndarray)), out.dtype)
    args = [a if isinstance(a, np.ndarray) else _constant(a, kind) for a in args]
    if fn in ("_xor", "_and"):
        bits: Any = _INT_VIEW[out.dtype.itemsize]
        fixed = [a if a.dtype == out.dtype or (fn == "_and" and k == 1) else a.astype(out.dtype) for k, a in enumerate(args)]
        if any(f is not a and a.ndim for f, a in zip(fixed, args, strict=True)):
            raise ProgramError(f"where() in an elementwise body mixes {args[0].dtype} and {args[1].dtype}; cast one of them")
        args = [a if a.dtype == np.int8 and fn == "_and" and k == 1 else a.view(bits) for k, a in enumerate(fixed)]
        out = out.view(bits)
    ufunc = getattr(np, _UFUNC[fn])
    if fn in ("max", "min"):  # NumPy deprecates a third positional argument for these two
        return partial(ufunc, *args, out=out)
    return partial(ufunc, *args, out)


def _constant(value: Any, kind: np.dtype) -> Any:
    """A constant as a 0-d array of the other operand's dtype: a Python number would be converted in every call."""
    if kind.kind == "b" and value in (0, 1):
        return np.array(bool(value))
    if kind.kind == "b" or (kind.kind in "iu" and (value != value or value in (math.inf, -math.inf) or value != int(value))):
        return np.asarray(value)
    return np.array(value, dtype=kind)
