"""Models written in pipeline stages: an exact one in small integers, and a small GPT whose first and last stage share their table."""

from __future__ import annotations

from typing import Any

import numpy as np

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import TestModel, train_ranks, train_single

L, D = fx.layers, "float64"


def integers(rng: Any, *shape: int, **options: Any) -> fx.ParamAttr:
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-1, 2, shape).astype("float32")), **options)


def layers(stages: int, optimizer: Any = None, width: int = 5, tp: bool = False) -> TestModel:
    """A perceptron with a layer in each stage and a loss that is a sum of squares: a step of SGD is exact in float32.

    `tp`: every weight is cut along its columns.
    """
    main, startup, rng = fx.Program("layers"), fx.Program("layers_startup"), np.random.default_rng(5)
    cut = {"placement": Shard(1, "tp")} if tp else {}
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, 6]), fx.data("y", [-1, width])
        h = x
        for s in range(stages):
            with fx.device_guard(f"stage:{s}"):
                weight, bias = integers(rng, h.shape[1], width, name=f"w{s}", **cut), integers(rng, width, name=f"b{s}")
                h = L.fc(h, width, act="relu" if s < stages - 1 else None, param_attr=weight, bias_attr=bias)
                if s == stages - 1:
                    loss = L.reduce_sum(L.square(h - y))
        _, pairs = (optimizer or fx.optimizer.SGD(0.5)).minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"x": rng.integers(-2, 3, (rows, 6)).astype("float32"), "y": rng.integers(-2, 3, (rows, width)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def gpt(stages: int = 2, tied: bool = True, optimizer: Any = None, dropout: float = 0.2) -> TestModel:
    """A block of attention in each stage; the embedding stands in the first, the logits and the loss in the last."""
    main, startup = fx.Program("gpt"), fx.Program("gpt_startup")
    words, length, width = 11, 4, 6
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, length], "int64"), fx.data("label", [-1, length, 1], "int64")
        for s in range(stages):
            with fx.device_guard(f"stage:{s}"):
                if s == 0:
                    table = fx.ParamAttr(name="table", initializer=fx.initializer.Normal(0.0, 0.3))
                    h = fx.embedding(ids, [words, width], param_attr=table, dtype=D)
                    h = L.dropout(h, dropout, dropout_implementation="upscale_in_train")
                n = L.layer_norm(h, begin_norm_axis=2)
                q, k, v = (L.fc(n, width, num_flatten_dims=2) for _ in range(3))
                h = h + L.matmul(L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.4)), v)
                h = h + L.fc(L.layer_norm(h, begin_norm_axis=2), width, num_flatten_dims=2, act="gelu")
                if s == stages - 1:
                    if tied:
                        logits = L.matmul(h, main.global_block().var("table"), transpose_y=True)
                    else:
                        logits = L.fc(h, words, num_flatten_dims=2)
                    loss = L.mean(L.softmax_with_cross_entropy(logits, label))
        rate = L.linear_lr_warmup(0.01, 5, 0.0, 0.01)
        _, pairs = (optimizer or fx.optimizer.AdamW(rate, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5))).minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, words, (rows, length)), "label": rng.integers(0, words, (rows, length, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def equal(model: TestModel, strategy: Any, trainers: Any, rows: tuple[int, ...] = (7, 8), fetch: tuple[str, ...] = ()) -> None:
    """The loss, every gradient, what else is fetched and all state are bit for bit those of one device."""
    feeds = [model.feed(n, k) for k, n in enumerate(rows)]
    wanted = [model.loss.name, *fetch, *[g for _, g in model.gradients]]
    one, scope = train_single(model, feeds[:1], wanted)  # a second step of SGD is not exact any more
    many, state = train_ranks(model, strategy, trainers, feeds[:1], wanted)
    for name, a, b in zip(wanted, one[0], many[0], strict=True):
        assert np.array_equal(a, b), name
    for name, value in state.items():
        assert np.array_equal(value, scope.get(name)), name
