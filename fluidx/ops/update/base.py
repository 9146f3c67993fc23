"""Base class of the update operators: one step of an optimizer for one parameter, or for any slice of it.

Every update op is elementwise over the parameter, its gradient and its state; its other inputs are scalars of one element. So a strategy
may shard a parameter anywhere and update each slice on another rank, with the same values. Norms of whole parameters (LARS, LAMB) are
inputs, computed by `squared_l2_norm`. Separate `scale` operators update the powers of beta (Adam).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ...ir import ANY, Arithmetic, Native, OpDef, ProgramError, TensorType
from ...ir.dtypes import HALVES
from ..expr.native import bind_native
from ..expr.nodes import operations
from ..shared.types import empty_arrays, type_of
from .trace import SCALARS, expressions, separate

# Number of elements of a block: the temporaries of a block stay in the L2 cache of a core.
BLOCK = 1 << 15


class Update(OpDef):
    """Base class of the update ops. A subclass declares its slots, `scalars` (computed once per step) and `formula`."""

    temps: ClassVar[int] = 1  # number of temporaries of the parameter's shape that `formula` gets
    # (xp, ins, outs, s, t, **attrs): writes `outs` from the tensors `ins`, the scalars `s` and the temporaries `t`. Each element of an
    # input is read before it is overwritten
    formula: ClassVar[Callable[..., None]]
    # (xp, *inputs of one element, **attrs) -> the scalars that `formula` needs, equal for all blocks
    scalars: ClassVar[Callable[..., Any]] = staticmethod(lambda xp, lr, **attrs: lr)  # the learning rate
    groups: ClassVar[str] = ""  # groups of operands in which the update is linear, as in an access pattern

    @classmethod
    def infer(cls, *types, **attrs):
        by_name = dict(zip((s.name for s in cls.in_slots), types, strict=True))
        param = by_name["Param"]
        if not param.is_float:
            raise ProgramError(f"op {cls.name}: Param must be a float, found {param}")
        for slot, t in by_name.items():
            if t is None:
                continue
            if not t.is_float:
                raise ProgramError(f"op {cls.name}: {slot} must be a float, found {t}")
            if slot in SCALARS:
                if any(d not in (1, ANY) for d in t.shape):
                    raise ProgramError(f"op {cls.name}: {slot} must have one element, found {t}")
            elif t.shape != param.shape:
                raise ProgramError(f"op {cls.name}: Param is {param}, {slot} is {t}; they must have the same shape")
            elif slot == "Grad" and t.dtype != param.dtype:
                raise ProgramError(f"op {cls.name}: Param is {param}, Grad is {t}; they must have the same dtype")
        result = []
        for s in cls.out_slots:  # a 16-bit state is rounded where it is stored, not here
            t = by_name.get(s.name.removesuffix("Out"))
            keeps = t is not None and (s.name == "ParamOut" or t.dtype not in HALVES)
            result.append(t if keeps else TensorType(work_dtype(param.dtype), param.shape))
        return result[0] if len(result) == 1 else tuple(result)

    @classmethod
    def pattern(cls, ins, outs, attrs):
        words = ["*" if s.name not in SCALARS or t is None else _one(t) for s, t in zip(cls.in_slots, ins, strict=True)]
        return f"{', '.join(words)} -> {', '.join('*' for _ in outs)} | {cls.groups}"

    @classmethod
    def _split(cls, arrays):
        """(tensors, scalars) of the inputs; a scalar gets one axis, so that it broadcasts against flat parts too."""
        tensors, ones = separate(cls, arrays)
        return tensors, [a if a is None else a.reshape(1) for a in ones]

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        """Calls with bitwise the results of `formula` on NumPy arrays, in one pass over memory."""
        present, wanted = tuple(a is not None for a in ins), tuple(a is not None for a in outs)
        update: Any = cls
        exprs = expressions(update, present, wanted, tuple(attrs.items()))
        arrays = {s.name: a.reshape(()) if s.name in SCALARS else a for s, a in zip(cls.in_slots, ins, strict=True) if a is not None}
        call = bind_native(exprs, arrays, [a for a in outs if a is not None], dry)
        return None if call is None else [call]

    @classmethod
    def _flops(cls, ins, outs, attrs):
        update: Any = cls
        exprs = expressions(update, tuple(t is not None for t in ins), tuple(t is not None for t in outs), tuple(attrs.items()))
        return ins[0].numel * operations(exprs, SCALARS)

    arithmetic = Arithmetic(flops=_flops)

    @classmethod
    def kernel(cls, xp, *arrays, out, **attrs):
        tensors, ones = cls._split(arrays)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        temps = [xp.empty(tensors[0].shape, tensors[0].dtype) for _ in range(cls.temps)]
        cls.formula(xp, tensors, outs, cls.scalars(xp, *ones, **attrs), temps, **attrs)

    @classmethod
    def _bind_scratch(cls, ins, outs, attrs):
        param = ins[0]
        shape = (BLOCK,) if param.numel > BLOCK else param.shape
        return [param.with_shape(shape)] * cls.temps

    @classmethod
    def _bind(cls, ins, outs, attrs, ctx, scratch=()):
        tensors, ones = cls._split(ins)
        outs = list(outs)
        scalars, formula = cls.scalars, cls.formula
        present = [a for a in (*tensors, *outs) if a is not None]
        size = tensors[0].size
        work = scratch or empty_arrays(cls._bind_scratch([type_of(tensors[0])], (), attrs))
        if size > BLOCK and all(a.flags.c_contiguous for a in present):

            def block(a, start):
                return None if a is None else a.reshape(-1)[start : start + BLOCK]

            parts = [
                ([block(a, i) for a in tensors], [block(a, i) for a in outs], [w[: min(BLOCK, size - i)] for w in work])
                for i in range(0, size, BLOCK)
            ]
        else:
            if work[0].shape != tensors[0].shape:
                work = [np.empty(tensors[0].shape, w.dtype) for w in work]
            parts = [(tensors, outs, work)]

        def run():
            s = scalars(np, *ones, **attrs)
            for tensor_parts, out_parts, temps in parts:
                formula(np, tensor_parts, out_parts, s, temps, **attrs)

        return run

    native = Native(calls=_calls, halves=True, any_size=True, bind=_bind, bind_scratch=_bind_scratch)


def _one(t: TensorType) -> str:
    """The axis words of a value of one element; an open size is 1 too, and must not be sharded."""
    return " ".join("." * t.ndim) if ANY in t.shape else "*"


def work_dtype(dtype: str) -> str:
    """The dtype of the computation: float32 for 16-bit parameters.

    >>> work_dtype("bfloat16"), work_dtype("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def param_sets(states: int, scalars: tuple[float, ...], positive: tuple[int, ...] = ()):
    """Sample arguments: Param, Grad, `states` state tensors and scalars; `positive` lists the states that hold squares."""
    for seed, shape in enumerate([(3, 4), (1,), (7,)]):
        rng = np.random.default_rng(seed)
        tensors = [rng.standard_normal(shape).astype("float32") for _ in range(2 + states)]
        for k in positive:
            tensors[2 + k] = np.square(tensors[2 + k]) + np.float32(0.1)
        yield [*tensors, *(np.full(1, s, "float32") for s in scalars)]


WHY = "an update is not differentiated"


def decaying_mean(xp, m, g, decay, t, m_out):
    """m_out = decay * m + (1 - decay) * g."""
    xp.multiply(g, 1.0 - decay, out=t)
    xp.multiply(m, decay, out=m_out)
    xp.add(m_out, t, out=m_out)


def decaying_square(xp, m, g, decay, t, m_out):
    """m_out = decay * m + (1 - decay) * g^2."""
    xp.multiply(g, g, out=t)
    decaying_mean(xp, m, t, decay, t, m_out)


def divided_step(xp, p, g, m, lr, epsilon, t, p_out):
    """p_out = p - lr * g / (sqrt(m) + epsilon)."""
    xp.sqrt(m, out=t)
    xp.add(t, epsilon, out=t)
    xp.divide(g, t, out=t)
    xp.multiply(t, lr, out=t)
    xp.subtract(p, t, out=p_out)
