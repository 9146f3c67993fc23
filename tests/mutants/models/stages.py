"""Marked with pipeline stages."""

from __future__ import annotations

import fluidx as fx

from .base import L, attr, fc, integers, model, real


@model
def stage_mlp() -> None:
    x, label = real("x", 5), integers("label", 3, 1)
    with fx.device_guard("stage:0"):
        h = fc(x, 4, "tanh", param_attr=attr("w1"), bias_attr=attr("b1"))
    with fx.device_guard("stage:1"):
        logits = fc(h, 3, param_attr=attr("w2"))
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    fx.optimizer.Momentum(0.1, 0.9).minimize(loss)


@model
def stage_tied() -> None:
    """Both stages read one table, two values cross, and a norm is over what both have."""
    ids, label = integers("ids", 6, 3), integers("label", 6, 1)
    with fx.device_guard("stage:0"):
        e = L.embedding(ids, [6, 4], param_attr=attr("table"), dtype="float64")
        h, skip = fc(L.reduce_sum(e, dim=1), 4, "relu", param_attr=attr("w1")), L.reduce_mean(e, dim=1)
    with fx.device_guard("stage:1"):
        h = fc(h, 4, "tanh", param_attr=attr("w2")) * skip
        logits = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    fx.optimizer.Adam(0.02, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)).minimize(loss)
