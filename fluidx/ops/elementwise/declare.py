"""`elementwise`: declares an elementwise op, its gradient op and their kernels from one scalar expression (ops/expr)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...ir.dtypes import FLOATS, INTS, np_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Native, Rewrite, Storage
from ...ir.opdef import OPS, OpDef, Sample
from ...ir.types import ANY, TensorType
from ..expr.derivative import derivative, in_terms_of, selected
from ..expr.native import expression_calls
from ..expr.nodes import BOOLEAN, Expr, is_const, lift, nodes, operations, substitute, sym, symbols, trace
from ..expr.numpy import bind_ufuncs, evaluate, ufunc_scratch
from ..shared.broadcast import aligned, aligned_shape, broadcast_sizes, reduced
from ..shared.samples import points
from ..shared.types import NUMBERS, need_fit
from .access import elementwise_pattern

Fitting = Callable[[str, Mapping[str, Any]], None]  # raises ProgramError if the dtype cannot hold the values of these attributes
DTYPES = {"float": FLOATS, "number": NUMBERS, "int": INTS, "bool": ("bool",), "any": (*NUMBERS, "bool")}

_FORMULA = 200  # maximal number of characters of a formula in the documentation


# -- the declaration ---------------------------------------------------------------------------------------------------------------


def elementwise(
    name: str,
    body: Callable[..., Any],
    *,
    doc: str,
    attrs: Mapping[str, Any] | None = None,
    dtypes: str = "float",
    axis: bool = False,
    domain: tuple[float, float] = (-3.0, 3.0),
    kinks: Sequence[float] = (),
    variants: Sequence[Mapping[str, Any]] = (),
    samples: Callable[[], Iterator[Sample]] | None = None,
    slope: Callable[..., Any] | None = None,
    grad: Callable[..., Any] | None = None,
    special: Callable[..., Any] | None = None,
    mixed: str | None = None,
) -> type[OpDef]:
    """Declare the elementwise op `name`, and `<name>_grad` if it has a derivative.

    `body` is a function of symbolic scalars: positional parameters x, y, ... are the inputs X, Y, ...; keyword-only parameters are
    attributes. Their defaults are in `attrs`; an attribute can be a condition of `where`. `dtypes` is "float", "number", "int", "bool" or
    "any"; all inputs have one dtype, and so has the result unless the body is a comparison. `axis` adds fluid's broadcast attribute. Unary
    samples are drawn from `domain`, away from `kinks`, once for each of `variants` (attributes); or `samples` yields the samples. `slope`
    is a hand-written derivative with respect to X, `grad` replaces the derived gradient. `special(xp, ins, out, attrs)` may return a call
    that replaces the derived kernel (integer division), or None. `mixed` is that of Autocast.
    """
    module = sys._getframe(1).f_globals["__name__"]
    parameters = inspect.signature(body).parameters.values()
    inputs = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    expr = trace(body)
    full = dict(attrs or {})
    if axis:
        full["axis"] = -1
    slots = tuple(n.upper() for n in inputs)
    is_bool = expr.fn in BOOLEAN
    scalar = ScalarExpression(expr, inputs, names, axis, special)
    fields: dict[str, Any] = scalar.fields() | {
        "name": name, "__module__": module, "__doc__": doc, "__qualname__": name, "attrs": full, "inputs": slots,
        "infer": staticmethod(_infer(name, dtypes, is_bool, axis, _fitting(name, expr, names, special))),
        "storage": Storage(inplace=() if is_bool and dtypes != "bool" else tuple((s, "Out") for s in reversed(slots))),
        "rewrite": Rewrite(identity_if=scalar.identity_if, folds=_folds(expr, inputs)), "autocast": Autocast(mixed=mixed),
    }  # fmt: skip
    draw = samples or (lambda: _draw(len(inputs), dtypes, domain, kinks, variants))
    fields["samples"] = staticmethod(draw)
    if grad is not None:
        fields["grad"] = staticmethod(grad)
    elif not is_bool and dtypes != "bool":
        fields["grad"] = staticmethod(_derive(name, expr, inputs, names, full, axis, module, draw, slope))
    return type(name, (OpDef,), fields)


def _folds(expr: Expr, inputs: Sequence[str]) -> str:
    """The function if the body is "max" or "min" of the operands, otherwise ""."""
    whole = tuple(("sym", s) for s in inputs)
    return expr.fn if expr.fn in ("max", "min") and tuple((a.fn, *a.args) for a in expr.args) == whole else ""


class ScalarExpression:
    """The expression `body` of an op whose inputs, in slot order, are the symbols `inputs`; `names` are its attributes. A call gives it for
    some attributes; the kernels follow from it.
    """

    def __init__(self, body: Expr, inputs: Sequence[str], names: Sequence[str], axis: bool, special: Any):
        self.body, self.inputs, self.names, self.axis, self.special = body, inputs, names, axis, special
        # constants as a key: they distinguish 0.0 from -0.0, numbers do not
        self._specialized = lru_cache(maxsize=256)(lambda values: substitute(body, dict(zip(names, values, strict=True))))
        # for some attribute values the expression may be the operand itself
        self.identity_if = (lambda x, attrs, count: self.specialized(attrs).fn == "sym") if names and len(inputs) == 1 else None

    def fields(self) -> dict[str, Any]:
        """The fields of the OpDef that follow from the expression."""
        return {
            "expr": self, "pattern": staticmethod(elementwise_pattern(self.body, self.inputs, self.names, self.axis)),
            "kernel": staticmethod(self.kernel), "arithmetic": Arithmetic(flops=self.flops),
            "native": Native(calls=self.calls, halves=True, any_size=True, bind=self.bind, bind_scratch=self.bind_scratch),
        }  # fmt: skip

    def specialized(self, attrs: Mapping[str, Any]) -> Expr:
        """The expression with numbers for the attributes."""
        made: Expr = self._specialized(tuple([lift(attrs[n]) for n in self.names]))
        return made

    def __call__(self, attrs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], ndim: int) -> tuple[Expr, dict[str, tuple[int, ...]]]:
        """The expression with numbers for the attributes, and for each symbol a shape that broadcasts to the result of `ndim` axes."""
        axes = [attrs["axis"] if self.axis and s == "y" else -1 for s in self.inputs]
        aligned = [aligned_shape(d, ndim, axis) for d, axis in zip(shapes, axes, strict=True)]
        return self.specialized(attrs), dict(zip(self.inputs, aligned, strict=True))

    def prepare(self, arrays: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> tuple[Expr, dict[str, Any]]:
        e, shapes = self(attrs, [a.shape for a in arrays], out.ndim)
        return e, {s: a if a.shape == d else a.reshape(d) for (s, d), a in zip(shapes.items(), arrays, strict=True)}

    def special_call(self, xp: Any, values: Mapping[str, Any], out: Any, attrs: Mapping[str, Any]) -> Any:
        return None if self.special is None else self.special(xp, list(values.values()), out, attrs)

    def bind(self, ins, outs, attrs, ctx, scratch=()):
        e, values = self.prepare(ins, outs[0], attrs)
        call = self.special_call(np, values, outs[0], attrs)
        return bind_ufuncs(e, values, outs[0], scratch) if call is None else call

    def calls(self, ins, outs, attrs, dry=False):
        e, values = self.prepare(ins, outs[0], attrs)
        return expression_calls(e, values, outs[0], dry) if self.special_call(np, values, outs[0], attrs) is None else None

    def bind_scratch(self, ins, outs, attrs):
        e, shapes = self(attrs, [t.shape for t in ins], outs[0].ndim)
        if e.fn in ("const", "sym") or all(a.fn in ("const", "sym") for a in e.args):
            return ()  # one ufunc
        types = {s: t.with_shape(d) for (s, d), t in zip(shapes.items(), ins, strict=True)}
        return ufunc_scratch(e, tuple([types[n] for n in symbols(e)]), outs[0])

    def kernel(self, xp, *arrays, out, **attrs):
        e, values = self.prepare(arrays, out, attrs)
        if (call := self.special_call(xp, values, out, attrs)) is not None:
            call()
        else:
            out[...] = evaluate(e, xp, values)

    def flops(self, ins, outs, attrs):
        return outs[0].numel * operations([self.specialized(attrs)])


def _fitting(name: str, expr: Expr, names: Sequence[str], special: Any) -> Fitting:
    """A check that a dtype holds the numbers which the body computes from its attributes. A `special` kernel allows fractions."""

    def check(dtype: str, attrs: Mapping[str, Any]) -> None:
        if not names or dtype in FLOATS:
            return
        for n in nodes(substitute(expr, {k: lift(attrs[k]) for k in names})):  # -1 as a scale is only a sign, not a constant
            if n.fn == "const":
                named = [k for k in names if attrs[k] in n.args]
                need_fit(name, " and ".join(named or names), n.args[0], dtype, cut=special is not None)

    return check


def _infer(name: str, dtypes: str, is_bool: bool, axis: bool, fitting: Fitting) -> Callable[..., TensorType]:
    allowed = DTYPES[dtypes]

    def infer(*types, **attrs):
        first = types[0]
        shape, dtype = first.shape, first.dtype
        for t in types:
            if t.dtype not in allowed:
                raise ProgramError(f"op {name}: expected {_wording(dtypes)}, found {t.dtype}; cast it first")
            if t.dtype != dtype:
                raise ProgramError(f"op {name}: X is {dtype} and Y is {t.dtype}; cast one of them")
            if t.shape != shape or ANY in shape and t.shape is not shape:  # two named axes may have different sizes
                shape = broadcast_sizes(name, shape, aligned(name, shape, t.shape, attrs["axis"]) if axis else t.shape)
        fitting(dtype, attrs)
        made = TensorType("bool" if is_bool else dtype, shape)
        return first if first.says(made) else made

    return infer


def _wording(dtypes: str) -> str:
    return {"float": "a float dtype", "number": "a number", "int": "an integer", "bool": "bool", "any": "a number or bool"}[dtypes]


def _derive(
    name: str, expr: Expr, inputs: Sequence[str], names: Sequence[str], full: Any, axis: bool, module: str, draw: Any, slope: Any
) -> Any:
    """The `grad` of the op, after declaring one gradient op per input: `<name>_grad`, or `<name>_grad_x`, `<name>_grad_y`."""
    rules: list[tuple[Any, Any]] = []  # (None, the constant 0 or 1), or (gradient op, names of its operands)
    for k, x in enumerate(inputs):
        d = derivative(expr, sym(x)) if slope is None else trace(slope)
        if is_const(d, 0) or is_const(d, 1):
            rules.append((None, d))
            continue
        short = in_terms_of(derivative(expr, sym(x), sym("Out")) if slope is None else d, expr)
        e = selected(_cheapest(sym("g") * short, sym("g") * d))
        needs = [s for s in (*inputs, "Out") if s in symbols(e)]
        grad_name = f"{name}_grad" if len(inputs) == 1 else f"{name}_grad_{x}"
        _declare_grad(grad_name, name, e, needs, names, full, axis, module, draw, k)
        rules.append((grad_name, needs))

    def grad(b, op, g):
        xs = [op[x.upper()] for x in inputs]
        grads: list[Any] = []
        for k, (grad_name, needs) in enumerate(rules):
            if grad_name is None and is_const(needs, 0):
                grads.append(None)
                continue
            dx = g if grad_name is None else b.emit(grad_name, *(op[n if n == "Out" else n.upper()] for n in needs), g, **op.attrs)
            others = xs[:k] + xs[k + 1 :]
            grads.append(reduced(b, dx, xs[k], op["Out"], *others, axis=op.attrs["axis"] if axis and k == 1 else -1))
        return grads[0] if len(grads) == 1 else tuple(grads)

    return grad


def _cheapest(*candidates: Expr) -> Expr:
    """The expression that needs the fewest saved values, then the fewest operations; the first of equals."""
    cost = [(len(symbols(e)), sum(1 for _ in nodes(e))) for e in candidates]
    return candidates[cost.index(min(cost))]


def _declare_grad(
    grad_name: str, name: str, e: Expr, needs: list[str], names: Any, full: Any, axis: bool, module: str, draw: Any, wrt: int
) -> None:
    order = [*needs, "g"]
    slots = [n if n == "Out" else n.upper() for n in needs]

    def infer(*types, **attrs):
        return types[-1]

    def samples():
        forward: Any = OPS[name]
        for s in draw():
            attrs = {**full, **s.attrs}
            t = forward.infer(*(TensorType(a.dtype.name, a.shape) for a in s.args), **attrs)
            if not t.is_float:
                continue
            out = np.empty(t.shape, np_dtype(t.dtype))
            forward.kernel(np, *s.args, out=out, **attrs)
            have = {**dict(zip(forward.inputs, s.args, strict=True)), "Out": out}
            g = np.random.default_rng(7).standard_normal(t.shape).astype(out.dtype)
            yield Sample((*(have[n] for n in slots), g), s.attrs, grad=(), why="a gradient op has no gradient of its own")

    scalar = ScalarExpression(e, order, names, axis, None)
    result = "Y@GRAD" if wrt else "X@GRAD"
    what = f" by {result[0]}, of the shape of Out" if grad_name.endswith(("_x", "_y")) else ""
    formula = repr(substitute(e, {"g": sym("Out@GRAD"), "x": sym("X"), "y": sym("Y")}))
    fields: dict[str, Any] = scalar.fields() | {
        "name": grad_name, "__module__": module, "__qualname__": grad_name, "attrs": full,
        "__doc__": f"The gradient of {name}{what}{f': {formula}' if len(formula) <= _FORMULA else ''}.",
        "inputs": (*slots, "Out@GRAD"), "outputs": (result,), "storage": Storage(inplace=(("Out@GRAD", result),)),
        "rewrite": Rewrite(identity_if=scalar.identity_if),
        "infer": staticmethod(infer), "samples": staticmethod(samples),
    }  # fmt: skip
    type(grad_name, (OpDef,), fields)


# -- samples ----------------------------------------------------------------------------------------------------------------------


def _draw(count: int, dtypes: str, domain: tuple[float, float], kinks: Sequence[float], variants: Sequence[Any]) -> Iterator[Sample]:
    def draw(shape: tuple[int, ...], seed: int) -> Any:
        x = points(shape, *domain, kinks=kinks, seed=seed)
        return x > 0 if dtypes == "bool" else x

    shapes: tuple[Any, ...] = ((3, 5), (1,), (7,), (2, 1, 3))
    if count == 2:
        for k, (a, b) in enumerate((((3, 5), (3, 5)), ((2, 3, 4), (4,)), ((3, 1), (1, 4)), ((1,), (5,)), ((7,), (1,)))):
            yield Sample.of(draw(a, 2 * k), draw(b, 2 * k + 1))
    else:
        for k, shape in enumerate(shapes):
            for attrs in variants or ({},):
                yield Sample.of(draw(shape, k), **attrs)
    if dtypes != "bool":
        yield Sample((*(draw((2, 3), 20 + k).astype("float64") for k in range(count)),), dict(variants[0]) if variants else {})
        half = tuple(draw((2, 3), 30 + k).astype("float16") for k in range(count))
        yield Sample(half, dict(variants[0]) if variants else {}, grad=(), why="float16 is not accurate enough for differences")
