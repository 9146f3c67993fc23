"""Random right programs: nets of many kinds of layer, losses and optimizers, and exact ones whose data are small integers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import fluidx as fx

from .models.base import L, attr, fc, feed, flag, integers, mask, real, whole

ACTS = (None, "relu", "tanh", "sigmoid")


class Writer:
    """Writes one random program; every choice comes from `rng`, so a number names a program."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.x = real("x", 5)
        self.inputs: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.inputs:
            self.inputs[name] = make()
        return self.inputs[name]

    # -- layers: a value [-1, k] in, one out ---------------------------------------------------------------------------------

    def fc(self, h: Any) -> Any:
        return fc(h, self.rng.randrange(2, 7), self.rng.choice(ACTS))

    def shared(self, h: Any) -> Any:
        h = fc(h, 4, param_attr=attr())
        w = attr("shared_w")
        return L.fc(L.fc(h, 4, param_attr=w, bias_attr=False, act=self.rng.choice(ACTS)), 4, param_attr=w, bias_attr=False)

    def residual(self, h: Any) -> Any:
        return h + fc(h, h.shape[1], self.rng.choice(ACTS))

    def conv(self, h: Any) -> Any:
        k = h.shape[1]
        image = L.reshape(fc(h, 12), [0, 2, 3, 2])
        out = L.conv2d(
            image, 2 + 2 * self.rng.randrange(2), [3, 2], padding=1, groups=self.rng.choice([1, 2]), param_attr=attr(), bias_attr=attr()
        )
        out = L.pool2d(out, 2, self.rng.choice(["max", "avg"]), self.rng.choice([1, 2]))
        if self.rng.random() < 0.3:
            out = L.batch_norm(L.tanh(out), param_attr=attr(), bias_attr=attr())
        return fc(out, k, self.rng.choice(ACTS))

    def layer_norm(self, h: Any) -> Any:
        return L.layer_norm(h, param_attr=attr(), bias_attr=attr())

    def group_norm(self, h: Any) -> Any:
        return L.reshape(L.group_norm(L.reshape(fc(h, 12), [0, 4, 3]), 2, param_attr=attr(), bias_attr=attr()), [0, 12])

    def batch_norm(self, h: Any) -> Any:
        h = L.tanh(h)  # of a bias just before it the gradient is zero but for rounding, and an update by signs or ratios shows that alone
        return L.batch_norm(h, param_attr=attr(), bias_attr=attr(), act=self.rng.choice(ACTS))

    def l2_normalize(self, h: Any) -> Any:
        return L.l2_normalize(h + 0.3, axis=1)

    def softmax(self, h: Any) -> Any:
        return L.softmax(h) if self.rng.random() < 0.5 else L.log_softmax(h)

    def dropout(self, h: Any) -> Any:
        return L.dropout(h, 0.3, dropout_implementation=self.rng.choice(["upscale_in_train", "downgrade_in_infer"]))

    def embedding(self, h: Any) -> Any:
        ids = self.once("ids", lambda: integers("ids", 7, 2))
        e = L.embedding(ids, [7, 3], param_attr=attr("table"), dtype="float64")
        flat = L.reshape(e, [0, 6]) if self.rng.random() < 0.5 else L.reduce_sum(e, dim=1)
        return L.concat([h, flat], axis=1)

    def attention(self, h: Any) -> Any:
        t = L.reshape(fc(h, 12), [0, 3, 4])
        q, k, v = (fc(t, 4, num_flatten_dims=2, bias_attr=False) for _ in range(3))
        q, k, v = (L.transpose(L.reshape(a, [0, 3, 2, 2]), [0, 2, 1, 3]) for a in (q, k, v))
        weights = L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.7))
        out = L.reshape(L.transpose(L.matmul(weights, v), [0, 2, 1, 3]), [0, 12])
        return out if self.rng.random() < 0.5 else L.reduce_mean(L.reshape(out, [0, 3, 4]), dim=1)

    def cond(self, h: Any) -> Any:
        p = self.once("p", lambda: flag("p"))
        k = h.shape[1]
        w = attr(fx.unique_name.generate("branch_w"))
        return L.cond(p, lambda: fc(h, k, "tanh", param_attr=w, bias_attr=False), lambda: L.scale(h, self.rng.choice([0.5, 2.0])))

    def cond_in_cond(self, h: Any) -> Any:
        p, q = self.once("p", lambda: flag("p")), self.once("q", lambda: flag("q"))

        def outer() -> Any:
            k = L.tanh(h)
            return L.cond(q, lambda: k * h, lambda: L.scale(k, 0.5)) + k

        return L.cond(p, outer, lambda: L.square(h))

    def loop(self, h: Any) -> Any:
        """A loop on the side; it has no gradient, so its result is taken as constant."""
        i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", self.rng.randrange(4))
        r = L.scale(h, 1.0)
        r.stop_gradient = True
        _, r = L.while_loop(lambda i, r: L.less_than(i, n), lambda i, r: [L.increment(i, in_place=False), L.tanh(r) * 0.5], [i, r])
        r.stop_gradient = True
        return h + r

    def axes(self, h: Any) -> Any:
        t = L.reshape(fc(h, 12), [-1, 2, 3, 2])
        kind = self.rng.choice(["sum", "mean", "max", "prod", "logsumexp"])
        dims = self.rng.choice([[1, 2], [2, 3], [1, 3], [3], [1]])
        if kind == "max":
            out = L.reduce_max(t, dim=dims)
        elif kind == "prod":
            out = L.reduce_prod(t, dim=dims[0])
        elif kind == "logsumexp":
            out = L.log(L.reduce_sum(L.exp(t), dim=dims))
        else:
            out = (L.reduce_sum if kind == "sum" else L.reduce_mean)(t, dim=dims)
        left = 1
        for d in out.shape[1:]:
            left *= d
        return L.reshape(out, [-1, left])

    def cut_and_join(self, h: Any) -> Any:
        k = h.shape[1]
        if k < 2:
            return h
        at = self.rng.randrange(1, k)
        a, b = L.split(h, [at, k - at], dim=1)
        return L.concat([b, L.slice(h, [1], [0], [at]), a], axis=1)

    def turned(self, h: Any) -> Any:
        w = L.create_parameter([4, h.shape[1]], "float64", attr=attr())
        return L.transpose(L.matmul(w, h, transpose_y=True), [1, 0])

    def scaled(self, h: Any) -> Any:
        w = L.create_parameter([self.rng.choice([1, h.shape[1]])], "float64", attr=attr())
        return L.elementwise_mul(h, w) if self.rng.random() < 0.7 else L.elementwise_div(h, L.square(w) + 1.0)

    def centred_weight(self, h: Any) -> Any:
        p = L.create_parameter([h.shape[1], 3], "float64", attr=attr())
        return L.matmul(h, p - L.reduce_mean(p, dim=self.rng.choice([[0], [1], [0, 1]]), keep_dim=True))

    def fed_scale(self, h: Any) -> Any:
        return h * self.once("w", lambda: whole("w", 1))

    def cumsum(self, h: Any) -> Any:
        return L.cumsum(h, axis=1)

    def over_batch(self, h: Any) -> Any:
        """A statistic of the whole batch."""
        kind = self.rng.choice(["mean", "max", "sum"])
        reduce = {"mean": L.reduce_mean, "max": L.reduce_max, "sum": L.reduce_sum}[kind]
        return h - L.scale(reduce(h, dim=0, keep_dim=True), 0.5)

    def stopped(self, h: Any) -> Any:
        side = fc(self.x, h.shape[1], "tanh")
        side.stop_gradient = True
        return h * side

    def branch_of_values(self, h: Any) -> Any:
        return L.where(L.greater_than(h, L.zeros_like(h)), L.square(h), L.scale(h, 0.1))

    def noise(self, h: Any) -> Any:
        return h + L.scale(L.gaussian_random([h.shape[1]], dtype="float64"), 0.1)

    # -- losses ----------------------------------------------------------------------------------------------------------------

    def loss(self, h: Any) -> Any:
        kind = self.rng.choice(["classes", "squares", "sum", "tokens", "huber", "rows", "sigmoid", "two", "penalty", "lines"])
        if kind == "classes":
            label = self.once("label", lambda: integers("label", 3, 1))
            return L.mean(L.softmax_with_cross_entropy(fc(h, 3), label))
        y = self.once("y", lambda: real("y", 2))
        out = fc(h, 2)
        if kind == "sum":
            return L.scale(L.reduce_sum(L.square(out - y)), 0.1)
        if kind == "tokens":
            counts = self.once("counts", lambda: mask("counts", 1))
            cost = L.reduce_sum(L.square(out - y), dim=1, keep_dim=True)
            return L.elementwise_div(L.reduce_sum(cost * counts), L.reduce_sum(counts))
        if kind == "huber":
            return L.mean(L.huber_loss(out, y, 0.7))
        if kind == "rows":
            return L.mean(L.reduce_sum(L.abs(out - y), dim=1))
        if kind == "sigmoid":
            return L.mean(L.sigmoid_cross_entropy_with_logits(out, L.sigmoid(y)))
        if kind == "two":
            return L.mean(L.square(out - y)) + L.scale(L.mean(L.abs(h)), 0.3)
        if kind == "penalty":
            p = L.create_parameter([3], "float64", attr=attr())
            return L.mean(L.square(out - y)) + L.scale(L.reduce_sum(L.square(p)), 0.2)
        if kind == "lines":
            return L.reduce_mean(L.log(L.reduce_sum(L.exp(out - y), dim=[1])))
        return L.mean(L.square(out - y))

    def optimizer(self, name: str = "") -> Any:
        rng = self.rng
        clip = rng.choice([
            None, None, fx.clip.GradientClipByGlobalNorm(0.1), fx.clip.GradientClipByNorm(0.05), fx.clip.GradientClipByValue(0.02),
            fx.clip.GradientClipByGlobalNorm(0.1, need_clip=lambda p: len(p.shape) > 1),
        ])  # fmt: skip
        decay = rng.choice([None, None, fx.regularizer.L2Decay(0.05), fx.regularizer.L1Decay(0.02)])
        rate: Any = 0.05
        p = rng.random()
        if p < 0.1:
            rate = L.exponential_decay(0.1, 2, 0.5)
        elif p < 0.2:
            rate = L.linear_lr_warmup(0.1, 2, 0.0, 0.1)
        more: dict[str, Any] = {"grad_clip": clip, "regularization": decay, **({"name": name} if name else {})}
        make = rng.choice([
            lambda: fx.optimizer.SGD(rate, **more),
            lambda: fx.optimizer.Momentum(rate, 0.9, use_nesterov=rng.random() < 0.5, **more),
            lambda: fx.optimizer.Adagrad(rate, **more),
            lambda: fx.optimizer.DecayedAdagrad(rate, **more),
            lambda: fx.optimizer.Adam(rate, **more),
            lambda: fx.optimizer.AdamW(rate, **more),
            lambda: fx.optimizer.Adamax(rate, **more),
            lambda: fx.optimizer.RMSProp(rate, momentum=0.5, centered=rng.random() < 0.5, epsilon=1e-3, **more),
            lambda: fx.optimizer.Adadelta(rate, epsilon=1e-3, **more),
            lambda: fx.optimizer.Ftrl(rate, l1=0.01, l2=0.01, **more),
            lambda: fx.optimizer.Lamb(rate, lamb_weight_decay=0.1, **more),
            lambda: fx.optimizer.LarsMomentum(rate, 0.9, lars_coeff=0.1, **more),
        ])  # fmt: skip
        return make()


LAYERS = (
    "fc", "fc", "shared", "residual", "conv", "layer_norm", "group_norm", "batch_norm", "l2_normalize", "softmax", "dropout", "embedding",
    "attention", "cond", "cond_in_cond", "loop", "axes", "axes", "cut_and_join", "turned", "scaled", "centred_weight", "fed_scale",
    "cumsum", "over_batch", "stopped", "branch_of_values", "noise",
)  # fmt: skip


def net(rng: Random) -> None:
    """A random net: one to four layers of any kind, a loss or two, an optimizer each."""
    w = Writer(rng)
    h = fc(w.x, 4, "tanh")
    for _ in range(rng.randrange(1, 4)):
        h = getattr(w, rng.choice(LAYERS))(h)
    first = w.loss(h)
    if rng.random() < 0.15:
        a, b = w.optimizer(), w.optimizer("second")
        pairs = a.backward(first), b.backward(w.loss(h))
        a.apply_gradients(pairs[0])
        b.apply_gradients(pairs[1])
        return
    w.optimizer().minimize(first)
    if rng.random() < 0.1:
        w.optimizer("second").minimize(w.loss(fc(w.x, 3)))
    if rng.random() < 0.15:
        fx.optimizer.ExponentialMovingAverage(0.8).update()


def exact(rng: Random) -> None:
    """Small integers everywhere, and only operators that add and multiply: one step is exact in any order of additions."""
    draw = np.random.default_rng(rng.randrange(2**32))

    def small(*shape: int) -> Any:
        values = draw.integers(-2, 3, shape).astype("float64")
        return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(values))

    def dense(x: Any, size: int, act: str | None = None) -> Any:
        k = 1
        for d in x.shape[1:]:
            k *= d
        return L.fc(x, size, act=act, param_attr=small(k, size), bias_attr=small(size))

    block = fx.default_main_program().global_block()
    x = feed("x", lambda r, rows: r.integers(-2, 3, (rows, 4)).astype("float64"), [-1, 4])
    h = dense(x, 4, rng.choice([None, "relu"]))
    for _ in range(rng.randrange(3)):
        kind = rng.choice(["dense", "residual", "conv", "embedding", "cond", "axes", "join", "turned", "max"])
        if kind == "dense":
            h = dense(h, rng.randrange(2, 5), rng.choice([None, "relu"]))
        elif kind == "residual":
            h = h + dense(h, h.shape[1], "relu")
        elif kind == "conv":
            image = L.reshape(dense(h, 12), [0, 2, 3, 2])
            h = L.reshape(L.conv2d(image, 2, [2, 2], padding=[0, 1], param_attr=small(2, 2, 2, 2), bias_attr=False), [0, 12])
        elif kind == "embedding":
            ids = block.var("ids") if block.has_var("ids") else integers("ids", 5, 2)
            e = L.embedding(ids, [5, 2], param_attr=small(5, 2), dtype="float64")
            h = L.concat([h, L.reduce_sum(e, dim=1)], axis=1)
        elif kind == "cond":
            p = block.var("p") if block.has_var("p") else flag("p")
            h = L.cond(p, lambda h=h: L.scale(h, 2.0), lambda h=h: L.relu(h) - h)
        elif kind == "axes":
            h = L.reduce_sum(L.reshape(dense(h, 12), [-1, 2, 3, 2]), dim=rng.choice([[1], [1, 2], [2]]))
            h = L.reshape(h, [-1, int(np.prod(h.shape[1:]))])
        elif kind == "join":
            h = L.concat([h, L.scale(h, 2.0)], axis=1)
        elif kind == "turned":
            h = L.transpose(L.transpose(h, [1, 0]), [1, 0])
        else:
            h = L.elementwise_max(h, L.scale(h, -1.0))
    square = L.square(dense(h, 2))
    loss = L.reduce_sum(square) if rng.random() < 0.6 else L.reduce_sum(L.reduce_sum(square, dim=1))
    rng.choice([
        lambda: fx.optimizer.SGD(0.5),
        lambda: fx.optimizer.Momentum(0.25, 0.5),
        lambda: fx.optimizer.SGD(0.5, regularization=fx.regularizer.L2Decay(0.25)),
        lambda: fx.optimizer.SGD(0.5, grad_clip=fx.clip.GradientClipByValue(8.0)),
    ])().minimize(loss)  # fmt: skip
