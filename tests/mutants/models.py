"""Tiny models of every kind. Each writes a program for one device; sizes are distinct and data is float64, so that a wrong value shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fluidx as fx
from fluidx.ir import Builder, Role, Shard

L = fx.layers
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass
class Model:
    """Main and startup, how to draw a feed of some rows, and the relative error that its values may have."""

    name: str
    main: fx.Program
    startup: fx.Program
    inputs: dict[str, Draw]
    tolerance: float = 1e-7
    feeds: dict[tuple[int, int], dict[str, np.ndarray]] = field(default_factory=dict)

    def feed(self, rows: int, step: int) -> dict[str, np.ndarray]:
        if (rows, step) not in self.feeds:
            rng = np.random.default_rng((rows, step))
            self.feeds[rows, step] = feed = {name: draw(rng, rows) for name, draw in self.inputs.items()}
            flags = [name for name, a in feed.items() if a.dtype == bool]
            for k, name in enumerate(flags):  # four steps take every combination of two
                feed[name] = np.array([bool(step + 1 >> k & 1)])
        return self.feeds[rows, step]


MODELS: dict[str, Callable[[], Any]] = {}
_inputs: dict[str, Draw] = {}
_options: dict[str, Any] = {}


def model(write: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[write.__name__] = write
    return write


def build(name: str, write: Callable[[], Any] | None = None) -> Model:
    """The model of that name (or what `write` writes), with names counted from 0."""
    main, startup = fx.Program(name), fx.Program(f"{name}_startup")
    main.random_seed = 7
    _inputs.clear()
    _options.clear()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        (write or MODELS[name])()
    return Model(name, main, startup, dict(_inputs), **_options)


# -- inputs ---------------------------------------------------------------------------------------------------------------------


def real(name: str, *shape: int, dtype: str = "float64") -> Any:
    _inputs[name] = lambda rng, rows: rng.standard_normal((rows, *shape)).astype(dtype)
    return fx.data(name, [-1, *shape], dtype)


def whole(name: str, *shape: int) -> Any:
    """A feed without a batch axis: the same on every rank."""
    _inputs[name] = lambda rng, rows: rng.uniform(0.5, 1.5, shape)
    return fx.data(name, list(shape), "float64")


def integers(name: str, top: int, *shape: int) -> Any:
    _inputs[name] = lambda rng, rows: rng.integers(0, top, (rows, *shape))
    return fx.data(name, [-1, *shape], "int64")


def mask(name: str, *shape: int) -> Any:
    def draw(rng: np.random.Generator, rows: int) -> np.ndarray:
        values = (rng.random((rows, *shape)) < 0.6).astype("float64")
        values.flat[0] = 1.0  # some token counts
        return values

    _inputs[name] = draw
    return fx.data(name, [-1, *shape], "float64")


def flag(name: str) -> Any:
    _inputs[name] = lambda rng, rows: np.array([False])
    return fx.data(name, [1], "bool")


# -- parts ----------------------------------------------------------------------------------------------------------------------


def attr(name: str | None = None, **more: Any) -> Any:
    return fx.ParamAttr(name=name, initializer=fx.initializer.Normal(0.1, 0.6), **more)


def fc(x: Any, size: int, act: str | None = None, **more: Any) -> Any:
    more.setdefault("param_attr", attr())
    more.setdefault("bias_attr", attr())
    return L.fc(x, size, act=act, **more)


def mlp(optimizer: Any) -> None:
    x, label = real("x", 5), integers("label", 3, 1)
    logits = fc(fc(x, 4, "tanh"), 3)
    optimizer.minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


# -- optimizers, clips, regularizers ------------------------------------------------------------------------------------------------


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


# -- layers -------------------------------------------------------------------------------------------------------------------------


@model
def conv_pool() -> None:
    image, label = real("image", 2, 5, 5), integers("label", 3, 1)
    h = L.conv2d(image, 3, 3, padding=1, param_attr=attr(), bias_attr=attr(), act="relu")
    h = L.pool2d(h, 2, "max", 2)
    loss = L.mean(L.softmax_with_cross_entropy(fc(h, 3), label))
    fx.optimizer.Momentum(0.1, 0.9).minimize(loss)


@model
def conv_batch_norm() -> None:
    image, label = real("image", 2, 5, 4), integers("label", 3, 1)
    h = L.conv2d(image, 3, 3, stride=2, padding=1, param_attr=attr(), bias_attr=False)
    h = L.pool2d(L.batch_norm(h, act="relu", param_attr=attr(), bias_attr=attr()), 2, "avg", 1)
    loss = L.mean(L.softmax_with_cross_entropy(fc(h, 3), label))
    fx.optimizer.SGD(0.2).minimize(loss)


@model
def dropout() -> None:
    x, label = real("x", 5), integers("label", 3, 1)
    h = L.dropout(fc(x, 6, "tanh"), 0.4, dropout_implementation="upscale_in_train")
    h = L.dropout(fc(h, 4, "relu"), 0.3)
    fx.optimizer.SGD(0.3).minimize(L.mean(L.softmax_with_cross_entropy(fc(h, 3), label)))


@model
def drop_connect() -> None:
    """Random numbers that are the same everywhere: a weight is dropped, not rows."""
    x, y = real("x", 5), real("y", 3)
    w = L.create_parameter([5, 3], "float64", attr=attr("w"))
    out = L.matmul(x, L.dropout(w, 0.4)) + L.scale(L.gaussian_random([3], dtype="float64"), 0.1)
    fx.optimizer.SGD(0.3).minimize(L.mean(L.square(out - y)))


@model
def embedding_tied() -> None:
    ids, label = integers("ids", 7, 3), integers("label", 7, 1)
    table = attr("table")
    e = L.embedding(ids, [7, 4], param_attr=table, dtype="float64")
    h = fc(L.reduce_mean(e, dim=1), 4, "tanh")
    logits = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
    fx.optimizer.Adam(0.02).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def attention() -> None:
    x, label = real("x", 3, 4), integers("label", 3, 1)
    h = L.layer_norm(x, begin_norm_axis=2, param_attr=attr(), bias_attr=attr())
    q, k, v = (fc(h, 4, num_flatten_dims=2, bias_attr=False) for _ in range(3))

    def heads(t: Any) -> Any:
        return L.transpose(L.reshape(t, [0, 3, 2, 2]), [0, 2, 1, 3])

    weights = L.softmax(L.matmul(heads(q), heads(k), transpose_y=True, alpha=0.7))
    mixed = L.reshape(L.transpose(L.matmul(weights, heads(v)), [0, 2, 1, 3]), [0, 3, 4])
    logits = fc(L.reduce_mean(h + mixed, dim=1), 3)
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def masked_tokens() -> None:
    """A sum over tokens divided by how many count."""
    x, label, counts = real("x", 4), integers("label", 3, 1), mask("counts", 1)
    cost = L.softmax_with_cross_entropy(fc(fc(x, 4, "relu"), 3), label)
    loss = L.elementwise_div(L.reduce_sum(L.elementwise_mul(cost, counts)), L.reduce_sum(counts))
    fx.optimizer.Adam(0.02).minimize(loss)


@model
def summed_loss() -> None:
    x, y = real("x", 5), real("y", 3)
    fx.optimizer.SGD(0.02).minimize(L.reduce_sum(L.square(fc(fc(x, 4, "sigmoid"), 3) - y)))


@model
def group_norm() -> None:
    x, y = real("x", 4, 3), real("y", 2)
    h = L.group_norm(fc(x, 4, num_flatten_dims=2), 2, param_attr=attr(), bias_attr=attr())
    fx.optimizer.SGD(0.2).minimize(L.mean(L.abs(fc(h, 2) - y)))


@model
def several_axes() -> None:
    """Reductions over several axes, a batch axis that moves, values cut and joined again."""
    x, y = real("x", 3, 4), real("y", 2)
    t = L.transpose(x, [1, 2, 0])
    top = L.reduce_max(t, dim=[0, 1])
    means = L.reduce_mean(x, dim=[1, 2], keep_dim=True)
    a, b = L.split(L.reshape(x - means, [-1, 12]), [5, 7], dim=1)
    h = fc(L.concat([b, a], axis=1), 2, "tanh")
    loss = L.mean(L.reduce_sum(L.square(h - y), dim=1)) + L.scale(L.mean(L.square(top)), 0.5)
    fx.optimizer.Momentum(0.1, 0.9).minimize(loss)


@model
def matrix_statistics() -> None:
    """Reductions of whole parameters and a feed that is the same on every rank."""
    x, y, w = real("x", 4), real("y", 3), whole("w", 3)
    p = L.create_parameter([4, 3], "float64", attr=attr("p"))
    out = L.elementwise_mul(L.matmul(x, p - L.reduce_mean(p, dim=0, keep_dim=True)), w)
    loss = L.mean(L.square(out - y)) + L.scale(L.reduce_sum(L.square(p)), 0.05)
    fx.optimizer.SGD(0.1).minimize(loss)


# -- control flow -------------------------------------------------------------------------------------------------------------------


@model
def cond_trained() -> None:
    """The loss comes out of a branch, and the branches have parameters."""
    x, y, big = real("x", 4), real("y", 2), flag("big")
    h = fc(x, 5, "tanh")
    loss = L.cond(
        big,
        lambda: L.mean(L.square(fc(h, 2, param_attr=attr("u"), bias_attr=False) - y)),
        lambda: L.scale(L.mean(L.abs(fc(h, 2, param_attr=attr("v"), bias_attr=False) - y)), 0.5),
    )
    fx.optimizer.SGD(0.2).minimize(loss)


@model
def cond_nested() -> None:
    x, y, p, q = real("x", 4), real("y", 3), flag("p"), flag("q")
    h = fc(x, 3, "tanh")

    def outer() -> Any:
        k = L.square(h)
        return L.cond(q, lambda: k * h, lambda: L.scale(k, 0.5)) + k

    h = L.cond(p, outer, lambda: L.cond(q, lambda: L.scale(h, 2.0), lambda: L.tanh(h)))
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.square(h - y)))


@model
def cond_dropout() -> None:
    x, y, p = real("x", 4), real("y", 3), flag("p")
    h = fc(x, 3, "tanh")
    h = L.cond(p, lambda: L.dropout(h, 0.4), lambda: L.scale(h, 0.6))
    fx.optimizer.SGD(0.1).minimize(L.mean(L.square(h - y)))


@model
def while_rounds() -> None:
    """A loop that refines a value behind the trained part, and a counter in the state that it moves."""
    x, y = real("x", 4), real("y", 3)
    h = fc(x, 3, "tanh")
    loss = L.mean(L.square(h - y))
    i, r = L.zeros([1], "int64"), L.scale(h, 1.0)
    r.stop_gradient = True
    n = L.fill_constant([1], "int64", 3)
    L.while_loop(lambda i, r: L.less_than(i, n), lambda i, r: [L.increment(i, in_place=False), L.scale(r, 0.5) + L.square(r)], [i, r])
    fx.optimizer.SGD(0.2).minimize(loss)


@model
def state_in_branches() -> None:
    """A branch inside a loop writes persistable state."""
    x, y, p = real("x", 4), real("y", 2), flag("p")
    total = L.create_global_var([1], 0.5, "float64", persistable=True, name="total")
    i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 2)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(total + L.cond(p, lambda: L.fill_constant([1], "float64", 2.0), lambda: L.scale(total, 0.25)), output=total)
        L.increment(i)
        L.less_than(i, n, cond=more)
    fx.optimizer.SGD(0.2).minimize(L.mean(L.square(L.elementwise_mul(fc(x, 2), total) - y)))


# -- losses, schedules, state ---------------------------------------------------------------------------------------------------------


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
    _options["tolerance"] = 1e-6  # the rate is float32


@model
def warmup() -> None:
    mlp(fx.optimizer.Momentum(L.linear_lr_warmup(L.piecewise_decay([2, 3], [0.1, 0.3, 0.05]), 2, 0.0, 0.2), 0.9))
    _options["tolerance"] = 1e-6


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
def inference() -> None:
    """Nothing is trained."""
    x = real("x", 5)
    L.softmax(fc(fc(x, 4, "relu"), 3))


@model
def single_precision() -> None:
    x, y = real("x", 5, dtype="float32"), real("y", 3, dtype="float32")
    fx.optimizer.Adam(0.02).minimize(L.mean(L.square(fc(fc(x, 4, "tanh"), 3) - y)))
    _options["tolerance"] = 1e-4


# -- one shape for everything, so that no type tells two values apart ------------------------------------------------------------------


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


# -- annotated for tensor parallelism -------------------------------------------------------------------------------------------------


@model
def mesh_mlp() -> None:
    """Columns of the first weight and rows of the second are cut over tp."""
    x, label = real("x", 5), integers("label", 3, 1)
    h = fc(x, 6, "relu", param_attr=attr("w1", placement=Shard(1, "tp")), bias_attr=attr("b1", placement=Shard(0, "tp")))
    logits = fc(h, 3, param_attr=attr("w2", placement=Shard(0, "tp")))
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def mesh_embedding() -> None:
    ids, label = integers("ids", 6, 3), integers("label", 3, 1)
    e = L.embedding(ids, [6, 4], param_attr=attr("table", placement=Shard(1, "tp")), dtype="float64")
    logits = fc(L.reduce_sum(e, dim=1), 3, param_attr=attr("head", placement=Shard(0, "tp")))
    fx.optimizer.Adam(0.02).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def mesh_uneven() -> None:
    """Cuts that do not divide, and a norm over all parameters, cut and whole."""
    x, y = real("x", 5), real("y", 3)
    h = fc(x, 7, "tanh", param_attr=attr("w1", placement=Shard(1, "tp")), bias_attr=attr("b1"))
    out = fc(h, 3, param_attr=attr("w2"), bias_attr=attr("b2", placement=Shard(0, "tp")))
    clip = fx.clip.GradientClipByGlobalNorm(0.1)
    fx.optimizer.Adam(0.02, grad_clip=clip, regularization=fx.regularizer.L2Decay(0.1)).minimize(L.mean(L.square(out - y)))


@model
def mesh_attention() -> None:
    """A head for each rank of tp."""
    x, label = real("x", 3, 4), integers("label", 3, 1)
    q, k, v = (fc(x, 4, num_flatten_dims=2, param_attr=attr(f"w_{n}", placement=Shard(1, "tp")), bias_attr=False) for n in "qkv")

    def heads(t: Any) -> Any:
        return L.transpose(L.reshape(t, [0, 3, 2, 2]), [0, 2, 1, 3])

    weights = L.softmax(L.matmul(heads(q), heads(k), transpose_y=True, alpha=0.7))
    mixed = L.reshape(L.transpose(L.matmul(weights, heads(v)), [0, 2, 1, 3]), [0, 3, 4])
    h = L.layer_norm(x + fc(mixed, 4, num_flatten_dims=2, param_attr=attr("w_o", placement=Shard(0, "tp"))), begin_norm_axis=2)
    logits = fc(L.reduce_mean(h, dim=1), 3)
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def mesh_conv() -> None:
    """Filters cut over tp, and a dropout of what they give."""
    image, label = real("image", 2, 5, 4), integers("label", 3, 1)
    h = L.conv2d(image, 4, 3, padding=1, param_attr=attr("f", placement=Shard(0, "tp")), bias_attr=False, act="relu")
    h = L.dropout(L.pool2d(h, 2, "max", 2), 0.3, dropout_implementation="upscale_in_train")
    fx.optimizer.SGD(0.2).minimize(L.mean(L.softmax_with_cross_entropy(fc(h, 3), label)))


@model
def mesh_same_shapes() -> None:
    x, y = real("x", 4), real("y", 4)
    h = fc(x, 4, "tanh", param_attr=attr("w1", placement=Shard(1, "tp")), bias_attr=attr("b1", placement=Shard(0, "tp")))
    h = fc(h, 4, "tanh", param_attr=attr("w2", placement=Shard(0, "tp")))
    h = fc(h, 4, param_attr=attr("w3", placement=Shard(1, "tp")))
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.square(h - y)))
