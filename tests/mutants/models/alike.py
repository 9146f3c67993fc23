"""One shape for everything, so that no type tells two values apart."""

from __future__ import annotations

import fluidx as fx

from .base import L, fc, flag, model, real


@model
def same_shapes() -> None:
    x, y = real("x", 3), real("y", 3)
    h = fc(fc(fc(x, 3, "tanh"), 3, "tanh"), 3)
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.square(h - y)))


@model
def same_shapes_branches() -> None:
    x, y, p = real("x", 3), real("y", 3), flag("p")
    h = fc(x, 3, "tanh")
    k = L.dropout(fc(x, 3, "sigmoid"), 0.4)
    h = L.cond(p, lambda: h * k, lambda: L.square(h) + k)
    fx.optimizer.Adam(0.02, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)).minimize(L.mean(L.square(fc(h, 3) - y)))
