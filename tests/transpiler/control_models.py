"""Random models whose layers stand in loops and branches, for what a transpile, its proof and its run have to agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import TestModel

L, D, WIDTH = fx.layers, "float64", 4
Layers = tuple[Any, ...]  # of plain data, so that a failure prints what to build

PLAIN = ("fc", "cut fc", "scale", "mean", "centred", "largest", "dropout", "parameter")
plain = st.sampled_from(PLAIN)
DECIDES = ("flag", "size")


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    layers = st.lists(inner, min_size=1, max_size=2).map(tuple)
    return st.one_of(
        st.tuples(st.just("cond"), st.sampled_from(DECIDES), layers, layers),
        st.tuples(st.just("loop"), st.integers(0, 3), layers),
    )


recipes = st.lists(st.one_of(plain, st.recursive(_nested(plain), _nested, max_leaves=4)), min_size=1, max_size=4).map(tuple)


def model(recipe: Layers, optimizer: Callable[[], Any] = lambda: fx.optimizer.Momentum(0.1, 0.9)) -> TestModel:
    """The model of a recipe, with an update; `feed(rows, seed)` sets the flag for every second seed."""
    main, startup = fx.Program("control"), fx.Program("control_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h, label = fx.data("x", [-1, WIDTH], D), fx.data("label", [-1, 1], D)
        flag = fx.data("flag", [1], "bool")
        h = _layers(recipe, h, flag)
        loss = L.mean(L.square(L.fc(h, 1) - label))
        _, pairs = optimizer().minimize(loss)

    def feed(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            "x": rng.standard_normal((rows, WIDTH)), "label": rng.standard_normal((rows, 1)), "flag": np.array([seed % 2 == 0])
        }  # fmt: skip

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def _layers(recipe: Sequence[Any], h: Any, flag: Any) -> Any:
    for layer in recipe:
        h = _layer(layer, h, flag)
    return h


def _layer(layer: Any, h: Any, flag: Any) -> Any:
    match layer:
        case "fc":
            return L.fc(h, WIDTH, act="tanh")
        case "cut fc":  # over an axis that a mesh may have
            by_columns = fx.ParamAttr(placement=Shard(1, "tp"))
            return L.fc(L.fc(h, 6, act="tanh", param_attr=by_columns, bias_attr=False), WIDTH)
        case "scale":
            return L.scale(h, 0.9, 0.1)
        case "mean":  # of the batch
            return h * L.tanh(L.mean(h))
        case "centred":
            return h - L.reduce_mean(h, dim=0, keep_dim=True)
        case "largest":  # of the batch: no sum
            return h - 0.1 * L.reduce_max(h)
        case "dropout":
            return L.dropout(h, 0.2, dropout_implementation="upscale_in_train")
        case "parameter":
            return L.matmul(h, L.create_parameter([WIDTH, WIDTH], D))
        case ("cond", decides, then, otherwise):
            pred = flag if decides == "flag" else L.mean(L.square(h)) > 0.3
            return L.cond(pred, lambda: _layers(then, h, flag), lambda: _layers(otherwise, h, flag))
        case ("loop", rounds, body):
            i, n = L.fill_constant([1], "int64", 0), L.fill_constant([1], "int64", rounds)
            _, h = L.while_loop(lambda i, _: L.less_than(i, n), lambda i, h: [i + 1, _layers(body, h, flag)], [i, h])
            return h
    raise AssertionError(layer)
