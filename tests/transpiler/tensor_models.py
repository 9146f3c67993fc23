"""Transformers whose parameters are cut over `tp`, in the manner of Megatron, and what their ranks send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import fluidx as fx
from fluidx.ir import Shard
from fluidx.ir.opdef import OPS, Effect
from fluidx.testing.models import TestModel

L, D = fx.layers, "float64"
WORDS, LENGTH, WIDTH, HEADS = 16, 6, 8, 4


def cut(name: str, axis: int, bias: bool = True) -> dict[str, Any]:
    """A weight cut by columns (1), with its bias, or by rows (0), whose bias is added once to the sum."""
    where = {"placement": Shard(0, "tp")} if axis and bias else {}
    return {
        "param_attr": fx.ParamAttr(name=f"{name}.w", placement=Shard(axis, "tp")),
        "bias_attr": fx.ParamAttr(name=f"{name}.b", **where) if bias else False,
    }


def as_operator(q: Any, k: Any, v: Any) -> Any:
    return L.scaled_dot_product_attention(q, k, v, causal=True)


def written_out(q: Any, k: Any, v: Any) -> Any:
    mask = L.assign(np.triu(np.full((LENGTH, LENGTH), -1e4), 1))
    return L.matmul(L.softmax(L.elementwise_add(L.matmul(q, k, transpose_y=True, alpha=0.5), mask)), v)


def block(h: Any, name: str, attend: Callable[..., Any], region: Callable[[Any], Any]) -> Any:
    """Attention with heads cut over tp, and a layer cut by columns and then by rows; `region` says where the stream between them lies."""
    qkv = L.fc(L.layer_norm(h, begin_norm_axis=2), 3 * WIDTH, num_flatten_dims=2, **cut(f"{name}.qkv", 1))
    qkv = L.transpose(L.reshape(qkv, [0, 0, HEADS, 3, WIDTH // HEADS]), [3, 0, 2, 1, 4])
    mixed = L.transpose(attend(*L.unstack(qkv)), [0, 2, 1, 3])
    h = h + region(L.fc(L.reshape(mixed, [0, 0, WIDTH]), WIDTH, num_flatten_dims=2, **cut(f"{name}.out", 0)))
    up = L.fc(L.layer_norm(h, begin_norm_axis=2), 4 * WIDTH, num_flatten_dims=2, act="gelu", **cut(f"{name}.up", 1))
    return h + region(L.fc(up, WIDTH, num_flatten_dims=2, **cut(f"{name}.down", 0)))


def gpt(
    layers: int = 2, attend: Callable[..., Any] = as_operator, region: Callable[[Any], Any] = lambda x: x, optimizer: Any = None
) -> TestModel:
    """A GPT whose table of words is cut by words, and is the last layer too: the classes of the loss are cut."""
    main, startup = fx.Program("gpt"), fx.Program("gpt_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, LENGTH], "int64"), fx.data("label", [-1, LENGTH, 1], "int64")
        table = fx.ParamAttr(name="table", initializer=fx.initializer.Normal(0.0, 0.3), placement=Shard(0, "tp"))
        words = fx.embedding(ids, [WORDS, WIDTH], param_attr=table, dtype=D)
        h = region(words + L.create_parameter([LENGTH, WIDTH], D, name="positions"))
        for k in range(layers):
            h = block(h, f"layer{k}", attend, region)
        h = L.layer_norm(h, begin_norm_axis=2)
        logits = L.matmul(h, main.global_block().var("table"), transpose_y=True)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
        _, pairs = (optimizer or fx.optimizer.Adam(0.01)).minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, WORDS, (rows, LENGTH)), "label": rng.integers(0, WORDS, (rows, LENGTH, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def transpiled(model: TestModel, mesh: Any, strategy: Any = None) -> Any:
    """By data_parallel without buckets, so that each gradient's collective can be counted, unless another strategy is given."""
    t = fx.DistributeTranspiler(strategy or fx.strategies.data_parallel(bucket_mb=0))
    return t.transpile(program=model.main, startup_program=model.startup, trainers=mesh)


def sent(t: Any, group: str = "tp") -> Counter[str]:
    """How often each collective runs over a group in a step."""
    return Counter(op.type for op in t.main.ops if OPS[op.type].effect is Effect.COLLECTIVE and op.attrs["group"] == group)
