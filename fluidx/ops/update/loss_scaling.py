"""Operators for loss scaling: gradients divided by the scale and checked for overflow, and the next scale."""

from __future__ import annotations

import numpy as np

from ...ir import Arithmetic, OpDef, ProgramError, Required, Sample, Storage, TensorType
from ..shared.samples import f32

_SCALAR = "op {}: {} must be {} of one element, found {}"


def _one(op: str, slot: str, t: TensorType, dtype: str) -> None:
    if t.numel != 1 or t.dtype != dtype:
        raise ProgramError(_SCALAR.format(op, slot, dtype, t))


class CheckFiniteAndUnscale(OpDef):
    """X / Scale, and the number of elements of X that are infinite or NaN, as a float of shape [1].

    fluid returns a flag; this is a count, because counts of parts and of several gradients can be added. So one sum tells every rank
    whether any gradient overflowed, even a rank that holds a part of a gradient or none of it. A float cannot wrap around to 0.
    """

    name = "check_finite_and_unscale"
    inputs, outputs = ("X", "Scale"), ("Out", "Count?")
    storage = Storage(inplace=(("X", "Out"),))
    pattern = "*, . -> *, . | *:+"
    arithmetic = Arithmetic(flops=2)

    @staticmethod
    def infer(x, scale):
        if not x.is_float:
            raise ProgramError(f"op check_finite_and_unscale: expected X of a float dtype, found {x.dtype}")
        _one("check_finite_and_unscale", "Scale", scale, "float32")
        return x, TensorType("float32", (1,))

    @staticmethod
    def kernel(xp, x, scale, *, out):
        result, count = out
        if count is not None:
            count[0] = x.size - xp.count_nonzero(xp.isfinite(x))
        xp.divide(x, scale.astype(x.dtype).reshape(()), out=result)

    @staticmethod
    def samples():
        why = "an update is not differentiated"
        for shape, scale, dtype in (((3, 4), 2, "float32"), ((7,), 4, "float16"), ((1,), 3, "float32"), ((5, 2, 3), 0.5, "float64")):
            x = f32(*shape).astype(dtype)
            x.flat[:3] = (np.inf, np.nan, -np.inf)[: x.size]
            yield Sample.of(x, np.array([scale], "float32"), grad=(), why=why)


class UpdateLossScaling(OpDef):
    """The next scale of a loss, and the number of consecutive good steps and of consecutive bad steps.

    After `incr_every_n_steps` good steps the scale is multiplied by `incr_ratio`, unless the result is infinite; after
    `decr_every_n_nan_or_inf` bad steps by `decr_ratio`, but it stays 1 or more. Both counts then restart at 0. Source: fluid's
    update_loss_scaling; Micikevicius et al., Mixed Precision Training (2018), section 3.2.
    """

    name = "update_loss_scaling"
    inputs = ("FoundInfinite", "PrevLossScaling", "InGoodSteps", "InBadSteps")
    outputs = ("LossScaling", "OutGoodSteps", "OutBadSteps")
    attrs = {
        "incr_every_n_steps": Required(int), "decr_every_n_nan_or_inf": Required(int),
        "incr_ratio": Required(float), "decr_ratio": Required(float),
    }  # fmt: skip
    storage = Storage(inplace=(("PrevLossScaling", "LossScaling"), ("InGoodSteps", "OutGoodSteps"), ("InBadSteps", "OutBadSteps")))
    pattern = "., ., ., . -> ., ., ."

    @staticmethod
    def infer(found, scale, good, bad, **attrs):
        for slot, t, dtype in zip(UpdateLossScaling.inputs, (found, scale, good, bad), ("bool", "float32", "int32", "int32"), strict=True):
            _one("update_loss_scaling", slot, t, dtype)
        return scale, good, bad

    @staticmethod
    def kernel(xp, found, scale, good, bad, *, out, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio):
        new_scale, new_good, new_bad = out
        goods, bads = xp.where(found, 0, good + 1), xp.where(found, bad + 1, 0)
        grows, falls = goods == incr_every_n_steps, bads == decr_every_n_nan_or_inf
        with np.errstate(over="ignore"):
            larger = scale * scale.dtype.type(incr_ratio)
        smaller = xp.maximum(scale * scale.dtype.type(decr_ratio), 1)
        new_scale[...] = xp.where(grows & xp.isfinite(larger), larger, xp.where(falls, smaller, scale))
        new_good[...] = xp.where(grows, 0, goods)
        new_bad[...] = xp.where(falls, 0, bads)

    @staticmethod
    def samples():
        attrs = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0, "decr_ratio": 0.5}
        for found, scale, good, bad in ((1, 1.5, 2, 1), (0, 8, 1, 0), (0, 8, 2, 1), (1, 8, 2, 0), (1, 8, 0, 1)):
            args = np.array([found], bool), np.array([scale], "float32"), np.array([good], "int32"), np.array([bad], "int32")
            yield Sample.of(*args, **attrs, grad=(), why="an update is not differentiated")
