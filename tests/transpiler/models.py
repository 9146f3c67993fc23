"""Small models of many kinds in float64, where ranks and one device differ by rounding alone, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import fluidx as fx
from fluidx.testing.models import TestModel, train_ranks, train_single

L, D = fx.layers, "float64"
Written = tuple[Any, Any, Callable[..., dict[str, np.ndarray]]]  # the loss, the optimizer, and what makes a feed


def written(write: Callable[[], Written]) -> TestModel:
    """The model that a function writes."""
    main, startup = fx.Program(write.__name__), fx.Program(f"{write.__name__}_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss, optimizer, feed = write()
        _, pairs = optimizer.minimize(loss)
    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def _rows(shape: tuple[int, ...], classes: int = 5) -> tuple[Any, Any, Callable[..., dict[str, np.ndarray]]]:
    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, *shape)), "label": rng.integers(0, classes, (rows, 1))}

    return fx.data("x", [-1, *shape], D), fx.data("label", [-1, 1], "int64"), feed


def _tokens(words: int, length: int) -> tuple[Any, Any, Callable[..., dict[str, np.ndarray]]]:
    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, words, (rows, length)), "label": rng.integers(0, words, (rows, length, 1))}

    return fx.data("ids", [-1, length], "int64"), fx.data("label", [-1, length, 1], "int64"), feed


def mlp() -> Written:
    """Momentum, weight decay and a metric."""
    x, label, feed = _rows((12,))
    logits = L.fc(L.fc(L.fc(x, 16, act="relu"), 9, act="tanh"), 5)
    L.accuracy(L.softmax(logits), label)
    loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    return loss, fx.optimizer.Momentum(0.1, 0.9, regularization=fx.regularizer.L2Decay(0.01)), feed


def conv() -> Written:
    """Convolutions, pooling and a training batch_norm, whose statistics are those of the whole batch."""
    x, label, feed = _rows((3, 8, 8))
    h = L.batch_norm(L.conv2d(x, 4, 3, padding=1, bias_attr=False), act="relu")
    h = L.conv2d(L.pool2d(h, 2, "max", 2), 6, 3, padding=1, act="relu")
    loss = L.mean(L.cross_entropy(L.fc(L.pool2d(h, 2, "avg", 2), 5, act="softmax"), label))
    return loss, fx.optimizer.Adam(0.01), feed


def gpt() -> Written:
    """One transformer block: a tied table, dropout, layer_norm, a clip by global norm and a warmed-up learning rate."""
    words, length, width, heads = 20, 6, 8, 2
    ids, label, feed = _tokens(words, length)
    table = fx.ParamAttr(name="table", initializer=fx.initializer.Normal(0.0, 0.3))
    h = fx.embedding(ids, [words, width], param_attr=table, dtype=D) + L.create_parameter([length, width], D, name="positions")
    h = L.dropout(h, 0.2, dropout_implementation="upscale_in_train")
    mask = L.assign(np.triu(np.full((length, length), -1e4), 1))
    a = L.layer_norm(h, begin_norm_axis=2)
    q, k, v = (L.transpose(L.reshape(L.fc(a, width, num_flatten_dims=2), [0, 0, heads, width // heads]), [0, 2, 1, 3]) for _ in range(3))
    weights = L.softmax(L.elementwise_add(L.matmul(q, k, transpose_y=True, alpha=0.5), mask))
    weights = L.dropout(weights, 0.1, dropout_implementation="upscale_in_train")
    mixed = L.reshape(L.transpose(L.matmul(weights, v), [0, 2, 1, 3]), [0, 0, width])
    h = h + L.fc(mixed, width, num_flatten_dims=2)
    up = L.fc(L.layer_norm(h, begin_norm_axis=2), 4 * width, num_flatten_dims=2, act="gelu")
    h = L.layer_norm(h + L.fc(up, width, num_flatten_dims=2), begin_norm_axis=2)
    logits = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
    rate = L.linear_lr_warmup(L.cosine_decay(0.01, 10, 4), 5, 0.0, 0.01)
    loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    return loss, fx.optimizer.AdamW(rate, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)), feed


def lamb() -> Written:
    """Two norms for each parameter."""
    x, label, feed = _rows((12,))
    loss = L.mean(L.softmax_with_cross_entropy(L.fc(L.fc(x, 16, act="sigmoid"), 5), label))
    return loss, fx.optimizer.Lamb(0.01), feed


def masked() -> Written:
    """A loss over the tokens that count: a sum over their number."""
    words, length = 11, 5
    ids, label, tokens = _tokens(words, length)
    mask = fx.data("mask", [-1, length, 1], D)
    cost = L.softmax_with_cross_entropy(L.fc(fx.embedding(ids, [words, 6], dtype=D), words, num_flatten_dims=2), label) * mask
    count = L.reduce_sum(mask)
    count.stop_gradient = True

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        kept = np.random.default_rng(seed).random((rows, length, 1)) < 0.6
        kept[0, 0] = True
        return tokens(rows, seed) | {"mask": kept.astype(D)}

    return L.reduce_sum(cost) / count, fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByNorm(0.2)), feed


def branch() -> Written:
    """A differentiated cond on a value that is fed whole."""
    x, label, rows_ = _rows((12,))
    flag = fx.data("flag", [1], D)
    h = L.fc(x, 8, act="relu")
    h = L.cond(L.greater_than(flag, L.fill_constant([1], D, 0.0)), lambda: L.scale(h, 2.0), lambda: L.tanh(h))
    loss = L.mean(L.softmax_with_cross_entropy(L.fc(h, 5), label))
    return loss, fx.optimizer.SGD(0.1), lambda rows, seed=0: rows_(rows, seed) | {"flag": np.array([seed % 2 - 0.5])}


def folded() -> Written:
    """Rows and tokens folded into one axis before the loss, a state of the batch's size, an expanded mask."""
    words, length, width = 11, 3, 6
    ids, label, feed = _tokens(words, length)
    h = fx.embedding(ids, [words, width], dtype=D) + L.fill_constant_batch_size_like(ids, [-1, length, width], D, 0.5)
    mask = L.expand(L.create_parameter([1, 1, width], D, name="mask"), [1, length, 1])
    h = L.layer_norm(L.elementwise_mul(h, mask), begin_norm_axis=2)
    logits = L.fc(L.reshape(h, [-1, width]), words)
    loss = L.mean(L.softmax_with_cross_entropy(logits, L.reshape(label, [-1, 1])))
    return loss, fx.optimizer.Momentum(0.1, 0.9, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)), feed


def attention() -> Written:
    """Attention as one operator: grouped queries, causal, with a trained bias on the scores."""
    x, label, feed = _rows((6, 8))
    h = L.layer_norm(x, begin_norm_axis=2)
    q, k, v = (L.transpose(L.reshape(L.fc(h, 2 * n, 2), [0, 0, n, 2]), [0, 2, 1, 3]) for n in (4, 2, 2))
    bias = L.create_parameter([4, 1, 6], D, default_initializer=fx.initializer.Normal(0.0, 0.3))
    mixed = L.scaled_dot_product_attention(q, k, v, bias, causal=True)
    mixed = L.reshape(L.transpose(mixed, [0, 2, 1, 3]), [0, 0, 8])
    loss = L.mean(L.softmax_with_cross_entropy(L.fc(L.tanh(mixed + h), 5), label))
    return loss, fx.optimizer.Adam(0.01), feed


def recomputed() -> Written:
    """Convolutions, norms and dropout, whose values are computed again for the backward pass, with the same random numbers."""
    x, label, feed = _rows((3, 8, 8))
    h = L.batch_norm(L.conv2d(x, 4, 3, padding=1, bias_attr=False), act="relu")
    h = L.dropout(L.pool2d(h, 2, "max", 2), 0.2, dropout_implementation="upscale_in_train")
    h = L.layer_norm(L.fc(h, 16, act="tanh"))
    loss = L.mean(L.softmax_with_cross_entropy(L.fc(L.fc(h, 16, act="sigmoid"), 5), label))
    return loss, fx.optimizer.RecomputeOptimizer(fx.optimizer.Momentum(0.1, 0.9), "auto"), feed


MODELS = {f.__name__: f for f in (mlp, conv, gpt, lamb, masked, branch, folded, attention, recomputed)}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring_optimizer": lambda: fx.strategies.ring_optimizer(chunk_mb=64 / 2**20),
    "zero1": fx.strategies.zero1,
    "zero2": fx.strategies.zero2,
    "small buckets": lambda: fx.strategies.data_parallel(bucket_mb=1 / 1024, first_bucket_mb=1 / 4096),
    "flat ranges of small buckets": lambda: fx.strategies.zero2(bucket_mb=1 / 1024, first_bucket_mb=1 / 4096),
    "zero1 along axes": lambda: fx.strategies.zero1(bucket_mb=0),
    "zero3": fx.strategies.zero3,
    "fsdp": lambda: fx.strategies.fsdp(units=1 / 2**10),
}


@cache
def model_of(name: str) -> TestModel:
    """The model of this name, which is written once."""
    return written(MODELS[name])


@cache
def _one_device(name: str, rows: tuple[int, ...], fetch: tuple[Any, ...]) -> tuple[list[list[np.ndarray]], Any]:
    model = model_of(name)
    return train_single(model, [model.feed(n, k) for k, n in enumerate(rows)], [model.loss, *fetch])


def same_answers(
    of: TestModel | str, strategy: Any, trainers: Any, rows: tuple[int, ...] = (7, 8, 2), fetch: tuple[Any, ...] = (), tol: float = 1e-9
) -> Any:
    """Train a model, or that of a name, on one device and on ranks, and compare the loss, what else is fetched, and all state. Returns what
    one device fetched."""
    model = model_of(of) if isinstance(of, str) else of
    feeds = [model.feed(n, k) for k, n in enumerate(rows)]
    wanted = [model.loss, *fetch]
    one, scope = _one_device(of, rows, fetch) if isinstance(of, str) else train_single(model, feeds, wanted)
    many, state = train_ranks(model, strategy, trainers, feeds, wanted)
    for k, (a, b) in enumerate(zip(one, many, strict=True)):
        for name, x, y in zip(wanted, a, b, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype, (name, x, y)
            np.testing.assert_allclose(y, x, rtol=tol, atol=tol, err_msg=f"{name} in step {k}")
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=tol, atol=tol, err_msg=name)
    return one
