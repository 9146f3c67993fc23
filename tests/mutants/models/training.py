"""Losses, schedules, shared parameters and state beside them."""

from __future__ import annotations

from typing import Any

import fluidx as fx
from fluidx.ir import Builder, Role

from .base import L, attr, fc, integers, mlp, model, real, tolerance


@model
def two_losses() -> None:
    """Two towers with an optimizer each, the second one's backward behind the first one's updates."""
    x, y = real("x", 4), real("y", 2)
    one = L.mean(L.square(fc(fc(x, 3, "tanh"), 2) - y))
    two = L.mean(L.abs(fc(x, 2) - y))
    fx.optimizer.Momentum(0.1, 0.9).minimize(one)
    fx.optimizer.Adam(0.01, name="second").minimize(two)


@model
def two_losses_shared() -> None:
    """Both losses train the same layer."""
    x, y = real("x", 4), real("y", 2)
    h = fc(x, 3, "tanh")
    a, b = fx.optimizer.Momentum(0.1, 0.9), fx.optimizer.SGD(0.05)
    pairs = a.backward(L.mean(L.square(fc(h, 2) - y))), b.backward(L.mean(L.abs(fc(h, 2) - y)))
    a.apply_gradients(pairs[0])
    b.apply_gradients(pairs[1])


@model
def schedule() -> None:
    mlp(fx.optimizer.SGD(L.exponential_decay(0.4, 2, 0.5)))
    tolerance(1e-6)  # the rate is float32


@model
def warmup() -> None:
    mlp(fx.optimizer.Momentum(L.linear_lr_warmup(L.piecewise_decay([2, 3], [0.1, 0.3, 0.05]), 2, 0.0, 0.2), 0.9))
    tolerance(1e-6)


@model
def shared_parameters() -> None:
    x, y = real("x", 4), real("y", 4)
    w, b = attr("w", learning_rate=0.5, regularizer=fx.regularizer.L2Decay(0.2)), attr("b")
    h = L.fc(L.fc(x, 4, param_attr=w, bias_attr=b, act="tanh"), 4, param_attr=w, bias_attr=b)
    fx.optimizer.Momentum(0.2, 0.5).minimize(L.mean(L.square(h - y)))


@model
def unused_parameters() -> None:
    """Parameters that are never read, read behind a stop, frozen, or known to a penalty only."""
    x, y = real("x", 4), real("y", 2)
    h = fc(x, 3, "tanh")
    side = fc(x, 3, "tanh")
    side.stop_gradient = True
    frozen = L.create_parameter([3], "float64", attr=attr("frozen", trainable=False))
    L.create_parameter([2, 3], "float64", attr=attr("never_read"))
    penalty = L.create_parameter([3], "float64", attr=attr("penalty"))
    loss = L.mean(L.square(fc(h + side * frozen, 2) - y)) + L.scale(L.reduce_sum(L.square(penalty)), 0.3)
    fx.optimizer.Adam(0.02).minimize(loss)


@model
def metrics() -> None:
    """Integer counts of one batch and over all of them."""
    x, label = real("x", 4), integers("label", 3, 1)
    logits = fc(x, 3)
    loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    L.accuracy(logits, label, k=2)
    best = L.argmax(logits, axis=1)
    right = L.reduce_sum(L.cast(L.equal(best, L.squeeze(label, [1])), "int64"), keep_dim=True)
    fx.optimizer.SGD(0.3).minimize(loss)
    seen = L.create_global_var([1], 0, "int64", persistable=True, name="seen")
    L.assign(L.sums([seen, right]), output=seen)


@model
def average_of_parameters() -> None:
    mlp(fx.optimizer.SGD(0.3))
    fx.optimizer.ExponentialMovingAverage(0.8).update()


@model
def custom_state() -> None:
    """An optimizer of plain operators: state made from the new parameter, and the parameter from that state."""

    class SlowWeights(fx.optimizer.base.Optimizer):
        def update(self, step: Any, p: Any, g: Any, lr: Any) -> None:
            s, b = step.state(p, "slow"), step.b
            b.elementwise_sub(p, b.elementwise_mul(g, lr), out={"Out": p})
            b.emit("sum", [b.scale(s, scale=0.5), b.scale(p, scale=0.5)], out={"Out": s})
            b.assign(s, out={"Out": p})

    mlp(SlowWeights(0.3))


@model
def custom_norms() -> None:
    """The norm of each gradient scales the update of another parameter."""
    x, y = real("x", 4), real("y", 2)
    pairs = fx.append_backward(L.mean(L.square(fc(fc(x, 3, "tanh"), 2) - y)))
    b = Builder(fx.default_main_program().global_block(), role=Role.OPTIMIZE)
    norms = [b.squared_l2_norm(g) for _, g in pairs]
    for k, (p, g) in enumerate(pairs):
        factor = b.scale(b.sqrt(norms[k - 1]), scale=0.3)
        b.elementwise_sub(p, b.elementwise_mul(g, factor), out={"Out": p})


@model
def gradient_penalty() -> None:
    """The gradient of a gradient."""
    x, y = real("x", 4), real("y", 2)
    x.stop_gradient = False
    h = fc(x, 2)
    h = h * h
    (slope,) = fx.gradients([h], [x])
    loss = L.mean(L.square(h - y)) + L.scale(L.mean(L.square(slope)), 0.1)
    fx.optimizer.SGD(0.02).minimize(loss)


@model
def accumulated_gradients() -> None:
    """Gradients are added up in the state; a branch applies them every second step."""
    x, y = real("x", 4), real("y", 2)
    loss = L.mean(L.square(fc(x, 2) - y))
    pairs = fx.append_backward(loss)
    main = fx.default_main_program()
    with main.role_guard(Role.OPTIMIZE):
        count = L.create_global_var([1], 0, "int64", persistable=True, name="count")
        L.increment(count)
        for p, g in pairs:
            held = L.create_global_var(p.shape, 0.0, "float64", persistable=True, name=f"{p.name}_held")
            L.assign(held + g, output=held)

            def apply(p: Any = p, held: Any = held) -> None:
                L.assign(p - L.scale(held, 0.1), output=p)
                L.assign(L.zeros_like(held), output=held)

            even = L.equal(L.elementwise_mod(count, L.fill_constant([1], "int64", 2)), L.zeros([1], "int64"))
            L.cond(even, apply, None)


@model
def gradient_merge() -> None:
    """Updates in every second run, with a clip and state inside of the branch."""
    inner = fx.optimizer.Momentum(0.1, 0.9, grad_clip=fx.clip.GradientClipByGlobalNorm(0.2))
    mlp(fx.optimizer.GradientMergeOptimizer(inner, 2))


@model
def power_sgd() -> None:
    """One weight is exchanged as factors of rank 1, another and the biases as they are."""
    x, y = real("x", 5), real("y", 3)
    loss = L.mean(L.square(fc(fc(x, 7, "tanh"), 3) - y))
    fx.optimizer.PowerSGDOptimizer(fx.optimizer.Momentum(0.1, 0.9), rank=1).minimize(loss)


@model
def inference() -> None:
    """Nothing is trained."""
    x = real("x", 5)
    L.softmax(fc(fc(x, 4, "relu"), 3))


@model
def single_precision() -> None:
    x, y = real("x", 5, dtype="float32"), real("y", 3, dtype="float32")
    fx.optimizer.Adam(0.02).minimize(L.mean(L.square(fc(fc(x, 4, "tanh"), 3) - y)))
    tolerance(1e-4)
