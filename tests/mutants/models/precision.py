"""Mixed precision and recompute: casts, a scaled loss, steps that are skipped, operators that run twice."""

from __future__ import annotations

from typing import Any

import fluidx as fx

from .base import L, attr, fc, integers, mlp, model, real, tolerance


def half(optimizer: Any) -> None:
    """Two products in 16 bits. The data is float32; ranks round terms of a sum that one device rounds once."""
    x, label = real("x", 5, dtype="float32"), integers("label", 3, 1)
    logits = fc(fc(x, 4, "tanh"), 3)
    optimizer.minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))
    tolerance(1e-2)


@model
def mixed_precision() -> None:
    half(fx.mixed_precision.decorate(fx.optimizer.Momentum(0.1, 0.9), init_loss_scaling=64.0, incr_every_n_steps=2))


@model
def mixed_precision_in_float32() -> None:
    """Gradients are widened before they are added up."""
    optimizer = fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.05))
    half(fx.mixed_precision.decorate(optimizer, init_loss_scaling=64.0, reduce_dtype="float32"))


@model
def bfloat16_constant_scale() -> None:
    optimizer = fx.optimizer.SGD(0.3)
    half(fx.mixed_precision.decorate(optimizer, dtype="bfloat16", init_loss_scaling=4.0, use_dynamic_loss_scaling=False))
    tolerance(2e-2)


@model
def scaled_and_skipped() -> None:
    """Nothing works in 16 bits, so that a wrong value shows; the scale is such that some steps overflow float32 and are skipped."""
    lists = fx.mixed_precision.AutoMixedPrecisionLists(custom_black_list=["mul", "matmul"])
    x, y = real("x", 5, dtype="float32"), real("y", 2, dtype="float32")
    loss = L.scale(L.mean(L.square(fc(fc(x, 4, "tanh"), 2) - y)), 64.0)
    inner = fx.optimizer.Momentum(0.1 / 64.0, 0.9)
    fx.mixed_precision.decorate(inner, lists, 2.0**127, 2, 1, decr_ratio=2.0**-4).minimize(loss)
    tolerance(1e-4)


@model
def recomputed() -> None:
    mlp(fx.optimizer.RecomputeOptimizer(fx.optimizer.Momentum(0.1, 0.9), ["fc_1.tmp_1"]))


@model
def recomputed_dropout() -> None:
    """A layer between two checkpoints draws the same numbers again; the statistics of a batch_norm advance once."""
    x, label = real("x", 5), integers("label", 3, 1)
    first = fc(x, 4, "tanh")
    h = L.batch_norm(L.dropout(first, 0.3, dropout_implementation="upscale_in_train"), param_attr=attr(), bias_attr=attr())
    second = fc(h, 4, "sigmoid")
    loss = L.mean(L.softmax_with_cross_entropy(fc(second, 3), label))
    fx.optimizer.RecomputeOptimizer(fx.optimizer.Adam(0.01), [first, second]).minimize(loss)
