"""Small random models for the transpiler's property tests. A recipe is plain data, so that a failure prints what to build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fluidx as fx
from fluidx.testing.models import TestModel

LAYERS = (
    "fc", "tied", "conv", "layer_norm", "dropout", "residual", "scale_param", "matmul_param", "stop", "twice", "embedding",
    "batch_norm", "centred", "softmax_of_batch", "transposed", "branch",
)  # fmt: skip
D = "float64"  # optimizers that divide by the root of a small moment magnify rounding
ACTS = (None, "relu", "tanh", "sigmoid")
OPTIMIZERS = {
    "SGD": lambda **k: fx.optimizer.SGD(0.1, **k),
    "Momentum": lambda **k: fx.optimizer.Momentum(0.1, 0.9, **k),
    "Adam": lambda **k: fx.optimizer.Adam(0.01, **k),
    "AdamW": lambda **k: fx.optimizer.AdamW(0.01, **k),
    "Adagrad": lambda **k: fx.optimizer.Adagrad(0.1, **k),
    "RMSProp": lambda **k: fx.optimizer.RMSProp(0.01, momentum=0.5, centered=True, **k),
    "Lamb": lambda **k: fx.optimizer.Lamb(0.01, **k),
    "Lars": lambda **k: fx.optimizer.LarsMomentum(0.1, 0.9, **k),
    "scheduled SGD": lambda **k: fx.optimizer.SGD(fx.layers.exponential_decay(0.2, 2, 0.5), **k),
    "warm Momentum": lambda **k: fx.optimizer.Momentum(fx.layers.linear_lr_warmup(0.1, 3, 0.0, 0.1), 0.9, **k),
}
CLIPS = {
    "none": lambda: None,
    "global": lambda: fx.clip.GradientClipByGlobalNorm(0.3),
    "global of matrices": lambda: fx.clip.GradientClipByGlobalNorm(0.3, need_clip=lambda p: len(p.shape) > 1),
    "norm": lambda: fx.clip.GradientClipByNorm(0.1),
    "value": lambda: fx.clip.GradientClipByValue(0.02),
}
DECAYS = {"none": lambda: None, "l2": lambda: fx.regularizer.L2Decay(0.05), "l1": lambda: fx.regularizer.L1Decay(0.02)}
LOSSES = ("mean", "sum", "two means", "mean and penalty", "penalty alone")


@dataclass(frozen=True)
class Recipe:
    layers: tuple[tuple[str, str | None], ...]
    loss: str
    optimizer: str
    clip: str
    decay: str
    param_lr: float
    own_decay: str
    ema: bool
    unused: bool
    no_grad: bool


_OPPOSITE = ("batch_norm", "centred")  # of two rows
_LINEAR = ("SGD", "Momentum", "scheduled SGD", "warm Momentum")  # in the gradient; the others divide by its size


def _decided(r: Recipe) -> bool:
    """Behind a layer that makes two rows opposite a bias may have a gradient that is 0 but for rounding: L1 would take its sign. Where
    another such layer follows it always has one, and an optimizer that divides by the gradient's size makes an update of its rounding."""
    opposite = sum(kind in _OPPOSITE for kind, _ in r.layers)
    if "l1" in (r.decay, r.own_decay) and any(kind == "batch_norm" for kind, _ in r.layers):
        return False
    return opposite < 2 or r.optimizer in _LINEAR


recipes = st.builds(
    Recipe,
    st.lists(st.tuples(st.sampled_from(LAYERS), st.sampled_from(ACTS)), min_size=1, max_size=4).map(tuple),
    st.sampled_from(LOSSES),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(list(CLIPS)),
    st.sampled_from(list(DECAYS)),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from(["none", "none", "l1", "l2"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
).filter(_decided)


def _layer(kind: str, act: str | None, h: Any, first: Any, attr: Any) -> Any:
    L = fx.layers
    width = h.shape[1]
    if kind == "fc":
        return L.fc(h, 6, act=act, param_attr=attr)
    if kind == "tied":  # one parameter, read twice
        w = fx.ParamAttr(name="tied_w")
        h = L.fc(h, 8, param_attr=attr)
        return L.fc(L.fc(h, 8, param_attr=w, bias_attr=False, act=act), 8, param_attr=w, bias_attr=False)
    if kind == "conv":
        image = L.reshape(h, [0, 1, width, 1])
        return L.reshape(L.conv2d(image, 2, [3, 1], padding=[1, 0], act=act), [0, 2 * width])
    if kind == "layer_norm":
        return L.layer_norm(h)
    if kind == "dropout":
        return L.dropout(h, 0.3, dropout_implementation="upscale_in_train")
    if kind == "residual":
        return h + L.fc(h, width, act=act)
    if kind == "scale_param":
        return L.elementwise_mul(h, L.create_parameter([1], D, default_initializer=fx.initializer.Constant(0.7)))
    if kind == "matmul_param":
        return L.matmul(h, L.create_parameter([width, 5], D, attr=attr))
    if kind == "stop":
        side = L.fc(first, width, act="tanh")
        side.stop_gradient = True
        return h + side
    if kind == "twice":  # one value reached by two ways
        return L.fc(h, 5) + L.tanh(L.fc(h, 5))
    if kind == "batch_norm":
        return L.batch_norm(L.tanh(h))  # a bias right before it would have a gradient that is rounding and nothing else
    if kind == "centred":  # needs a value of the whole batch
        h = L.tanh(h)
        return h - L.reduce_mean(h, dim=0)
    if kind == "softmax_of_batch":
        return L.softmax(L.tanh(h), axis=0)
    if kind == "transposed":
        return L.transpose(L.elementwise_mul(L.transpose(h, [1, 0]), L.create_parameter([width, 1], D)), [1, 0])
    if kind == "branch":
        # not 0: the mean of a normalized value is, but for rounding
        return L.cond(L.reduce_mean(h) > 0.01, lambda: L.tanh(h), lambda: L.scale(h, 0.5))
    ids = L.cast(L.clip(L.slice(first, [1], [0], [1]) * 2.0 + 4.0, 0.0, 8.0), "int64")
    return L.concat([h, L.embedding(ids, [9, 3], dtype=D)], axis=1)


def build(r: Recipe) -> TestModel:
    L = fx.layers
    main, startup = fx.Program("random"), fx.Program("random_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, 7], D), fx.data("y", [-1, 3], D)
        attr = fx.ParamAttr(learning_rate=r.param_lr, regularizer=DECAYS[r.own_decay]())
        h = L.fc(x, 6, act="tanh")
        for kind, act in r.layers:
            h = _layer(kind, act, h, x, attr)
        out = L.fc(h, 3, param_attr=fx.ParamAttr(name="head"))
        if r.unused:
            L.fc(h, 2)
            L.create_parameter([4, 3], D, name="never_read")
        square = L.square(out - y)
        if r.loss == "mean":
            loss = L.mean(square)
        elif r.loss == "sum":
            loss = L.reduce_sum(square)
        elif r.loss == "two means":
            loss = L.mean(square) + L.scale(L.mean(L.abs(out)), 0.3)
        elif r.loss == "mean and penalty":  # the second term does not depend on the batch
            loss = L.mean(square) + L.scale(L.reduce_sum(L.square(main.global_block().var("head"))), 0.01)
        else:
            loss = L.mean(L.reduce_sum(L.square(L.fc(x, 3, param_attr=fx.ParamAttr(name="other"))), dim=1)) + L.mean(square)
        optimizer = OPTIMIZERS[r.optimizer](grad_clip=CLIPS[r.clip](), regularization=DECAYS[r.decay]())
        _, pairs = optimizer.minimize(loss, no_grad_set={"fc_0.b_0"} if r.no_grad else None)
        if r.ema:
            fx.optimizer.ExponentialMovingAverage(0.9).update()

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 7)), "y": rng.standard_normal((rows, 3))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])
