"""Optimizers, clips and regularizers over one small model."""

from __future__ import annotations

import fluidx as fx

from .base import L, fc, mlp, model, real


@model
def sgd() -> None:
    mlp(fx.optimizer.SGD(0.3))


@model
def momentum() -> None:
    mlp(fx.optimizer.Momentum(0.1, 0.9, use_nesterov=True, regularization=fx.regularizer.L2Decay(0.1)))


@model
def adagrad() -> None:
    mlp(fx.optimizer.Adagrad(0.1, initial_accumulator_value=0.1))


@model
def decayed_adagrad() -> None:
    mlp(fx.optimizer.DecayedAdagrad(0.1))


@model
def adam() -> None:
    mlp(fx.optimizer.Adam(0.01))


@model
def adamw() -> None:
    mlp(fx.optimizer.AdamW(0.01, weight_decay=0.1))


@model
def adamax() -> None:
    mlp(fx.optimizer.Adamax(0.01, regularization=fx.regularizer.L1Decay(0.02)))


@model
def rmsprop() -> None:
    mlp(fx.optimizer.RMSProp(0.01, momentum=0.5, centered=True))


@model
def adadelta() -> None:
    mlp(fx.optimizer.Adadelta(0.5, epsilon=1e-3))


@model
def ftrl() -> None:
    mlp(fx.optimizer.Ftrl(0.1, l1=0.01, l2=0.02))


@model
def lamb() -> None:
    mlp(fx.optimizer.Lamb(0.01, lamb_weight_decay=0.1))


@model
def lars() -> None:
    mlp(fx.optimizer.LarsMomentum(0.1, 0.9, lars_coeff=0.1))


@model
def clip_global_norm() -> None:
    mlp(fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.05), regularization=fx.regularizer.L1Decay(0.02)))


@model
def clip_norm() -> None:
    mlp(fx.optimizer.SGD(0.3, grad_clip=fx.clip.GradientClipByNorm(0.02)))


@model
def clip_value_and_error() -> None:
    x, y = real("x", 5), real("y", 2)
    h = fc(x, 4, "tanh")
    fx.clip.ErrorClipByValue(0.02).attach(h)
    loss = L.mean(L.square(fc(h, 2) - y))
    fx.optimizer.Momentum(0.1, 0.9, grad_clip=fx.clip.GradientClipByValue(0.05)).minimize(loss)
