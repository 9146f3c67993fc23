"""Tracing of update formulas, and of elementwise kernels, into scalar expressions: they run once on stand-ins that record array operations.

So an update has one definition, and the vector machine computes its outputs in one pass over memory. Nothing is simplified or reordered:
the results are bitwise equal to those of the NumPy formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..expr.nodes import Expr, const, lift, make_node, sym

# Slots of one element; every other slot of an update has the parameter's shape.
SCALARS = ("LearningRate", "Beta1Pow", "Beta2Pow", "ParamNormSq", "GradNormSq", "UpdateNormSq", "Decay")

_FUNCTIONS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg", "sqrt": "sqrt", "exp": "exp", "log": "log",
    "absolute": "abs", "abs": "abs", "log1p": "log1p", "sign": "sign", "minimum": "min", "maximum": "max", "power": "pow", "where": "where",
}  # fmt: skip


def _binary(fn: str, swapped: bool = False) -> Any:
    def method(self: Traced, other: Any) -> Traced:
        a, b = self.e, _expr(other)
        return Traced(make_node(fn, b, a) if swapped else make_node(fn, a, b))

    return method


class Traced:
    """Stands for an array in arithmetic: it holds the expression of one element."""

    dtype = None

    def __init__(self, e: Expr | None = None) -> None:
        self.value = e

    @property
    def e(self) -> Expr:
        assert self.value is not None, "an update reads an array that it has not written"
        return self.value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.value = _expr(value)

    def __neg__(self) -> Traced:
        return Traced(make_node("neg", self.e))

    def astype(self, dtype: Any) -> Traced:
        return self  # all arrays of a traced update have one dtype

    __add__, __radd__ = _binary("add"), _binary("add", swapped=True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", swapped=True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", swapped=True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", swapped=True)
    __gt__, __ge__, __lt__, __le__, __ne__ = (_binary(fn) for fn in ("gt", "ge", "lt", "le", "ne"))
    __and__, __or__ = _binary("and"), _binary("or")


def _expr(value: Any) -> Expr:
    return value.e if isinstance(value, Traced) else lift(value)


class _Recorder:
    """Stands for numpy: its functions write expressions into `out`."""

    def __getattr__(self, name: str) -> Any:
        try:
            fn = _FUNCTIONS[name]
        except KeyError:
            raise AttributeError(f"a formula that uses xp.{name} cannot be traced; add it to ops/update/trace.py") from None

        def call(*args: Any, out: Traced | None = None) -> Traced:
            out = Traced() if out is None else out
            out.value = make_node(fn, *(_expr(a) for a in args))
            return out

        return call

    def clip(self, x: Any, low: Any, high: Any, out: Traced | None = None) -> Traced:
        return self.minimum(self.maximum(x, low), high, out=out)


def separate(update: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(tensors, scalars) of the inputs, in slot order."""
    pairs = list(zip(update.in_slots, values, strict=True))
    return [a for s, a in pairs if s.name not in SCALARS], [a for s, a in pairs if s.name in SCALARS]


@lru_cache(maxsize=256)
def expressions(update: Any, present: tuple[bool, ...], wanted: tuple[bool, ...], attrs: tuple[tuple[str, Any], ...]) -> Sequence[Expr]:
    """One expression for each wanted output, over symbols with the names of the input slots. `present` lists the given inputs."""
    ins = [Traced(sym(s.name)) if p else None for s, p in zip(update.in_slots, present, strict=True)]
    tensors, ones = separate(update, ins)
    outs = [Traced() if w else None for w in wanted]
    xp = _Recorder()
    scalars = update.scalars(xp, *ones, **dict(attrs))
    update.formula(xp, tensors, outs, scalars, [Traced() for _ in range(update.temps)], **dict(attrs))
    return tuple(const(0.0) if o.value is None else o.value for o in outs if o is not None)


@lru_cache(maxsize=256)
def kernel_expressions(definition: Any, attrs: tuple[tuple[str, Any], ...]) -> Sequence[Expr]:
    """One expression for each output of an op whose kernel computes element by element, over symbols with the names of the input slots.

    >>> from fluidx.ir.opdef import opdef
    >>> kernel_expressions(opdef("huber_loss_grad"), (("delta", 1.0),))[0]
    min(max(Residual, -1), 1) * Out@GRAD
    """
    outs = [Traced() for _ in definition.out_slots]
    ins = [Traced(sym(s.name)) for s in definition.in_slots]
    definition.kernel(_Recorder(), *ins, out=outs[0] if len(outs) == 1 else tuple(outs), **dict(attrs))
    return tuple(o.e for o in outs)
