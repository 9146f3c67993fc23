"""The programs that a calibration runs: networks with products, convolutions and attention of usual shapes, and the samples of all ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import layers, optimizer
from ...ir.defaults import program_guard
from ...ir.program import Program
from ...ir.unique_name import guard
from ...layers.declare import fluid_data as data

Feed = dict[str, np.ndarray]


class CalibrationProgram(NamedTuple):
    """A program, the one that initialises it, its feed, and what it fetches."""

    main: Program
    startup: Program
    feed: Feed
    fetch: Sequence[Any]


def networks() -> Iterator[Callable[[], CalibrationProgram]]:
    """Makers of networks that are trained. Sizes are a few steps of a factor apart, so that most shapes have a near one."""
    for batch, widths, update in _DENSE:
        yield partial(_trained, f"dense {batch}", batch, widths[:1], partial(_dense, widths[1:]), widths[-1], update)
    for batch, image, plan, update in _CONVOLUTIONS:
        yield partial(_trained, f"convolutions {batch}x{image}", batch, image, partial(_convolved, plan), 16, update)
    for batch, tokens, width, heads in _ATTENTION:
        yield partial(_transformer, batch, tokens, width, heads)


_UPDATES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizer.SGD(0.01),
    "momentum": lambda: optimizer.Momentum(0.01, 0.9),
    "adam": lambda: optimizer.Adam(0.001),
}
_DENSE = (
    (16, (64, 96, 64, 16), "sgd"),
    (64, (256, 384, 256, 32), "adam"),
    (96, (400, 160, 48, 12), "momentum"),
    (192, (1024, 768, 768, 20), "adam"),
    (512, (384, 1536, 384, 100), "momentum"),
)
# (filters, size of a filter, stride, what follows): "p" pools by 2, "n" normalizes, "r" adds what went in, "b" has a bias and no norm,
# "l" has no relu behind
# Channels are those that networks usually have, powers of 2: images that lie so far apart collide in caches.
_CONVOLUTIONS = (
    (48, (1, 28, 28), ((8, 5, 1, "bp"), (16, 5, 1, "bp")), "momentum"),
    (96, (3, 32, 32), ((8, 5, 1, "bp"), (16, 5, 1, "bp"), (32, 3, 1, "b")), "sgd"),
    (40, (1, 24, 24), ((4, 5, 1, "bp"), (12, 5, 1, "bp")), "sgd"),
    (16, (3, 32, 32), ((48, 3, 1, "n"), (48, 3, 1, "nr"), (96, 3, 2, "n"), (96, 3, 1, "nr")), "momentum"),
    (64, (3, 32, 32), ((32, 3, 1, "n"), (32, 3, 1, "nr"), (64, 3, 2, "n")), "momentum"),
    (20, (64, 32, 32), ((64, 3, 1, "n"), (64, 3, 1, "nr"), (128, 3, 2, "n"), (256, 1, 2, "nl")), "momentum"),
    (20, (128, 16, 16), ((128, 3, 1, "n"), (128, 3, 1, "nr"), (256, 3, 2, "n"), (512, 1, 2, "nl")), "momentum"),
    (20, (256, 8, 8), ((256, 3, 1, "n"), (256, 3, 1, "nr"), (512, 3, 2, "n")), "momentum"),
    (20, (512, 4, 4), ((512, 3, 1, "n"), (512, 3, 1, "nr")), "momentum"),
    (24, (320, 8, 8), ((384, 3, 2, "n"), (448, 3, 1, "n")), "momentum"),
    (6, (128, 28, 28), ((128, 3, 1, "n"), (128, 3, 1, "nr"), (256, 1, 2, "n"), (256, 3, 1, "nr")), "momentum"),
    (4, (3, 112, 112), ((32, 7, 2, "np"), (64, 1, 1, "n"), (64, 3, 1, "n"), (128, 1, 1, "n")), "momentum"),
    # of more images, without the long products
    (40, (16, 32, 32), ((64, 1, 1, "n"), (64, 1, 1, "nr"), (128, 1, 2, "nl"), (128, 1, 1, "nr")), "momentum"),
    (40, (16, 8, 8), ((256, 1, 1, "n"), (256, 1, 1, "nr"), (512, 1, 2, "nl"), (512, 1, 1, "nr")), "momentum"),
)
_ATTENTION = ((16, 128, 128, 4), (6, 96, 320, 5), (2, 256, 192, 6))


def small_network() -> CalibrationProgram:
    """Two convolutions, of which a training step takes less than 0.1 MB, with most kinds of kernels."""
    return _trained("small", 2, (1, 8, 8), partial(_convolved, ((4, 3, 1, "np"), (4, 3, 1, "nr"))), 16, "momentum")


def copies() -> CalibrationProgram:
    """Copies from 1 KiB to 64 MiB."""
    main, startup = Program("copies"), Program("copies startup")
    for k in range(9):
        numel = 1 << 8 + 2 * k
        for p, op, attrs in ((startup, "fill_constant", {"shape": (numel,), "value": 1.0}), (main, "assign", {})):
            for name in ("from", "to"):
                p.global_block().create_var(f"{name}.{numel}", (numel,), "float32", persistable=True)
            outs = (f"from.{numel}", f"to.{numel}") if p is startup else (f"to.{numel}",)
            for out in outs:
                p.global_block().append_op(op, {} if p is startup else {"X": f"from.{numel}"}, {"Out": out}, attrs)
    return CalibrationProgram(main, startup, {}, [])


def _trained(
    name: str, batch: int, shape: Sequence[int], net: Callable[[Any], Any], classes: int, update: str
) -> CalibrationProgram:
    """A network with a loss over classes, and its update."""
    main, startup = Program(name), Program(f"{name} startup")
    main.random_seed = startup.random_seed = 1
    random = np.random.default_rng(0)
    with guard(), program_guard(main, startup):
        x, label = data("x", [-1, *shape], "float32"), data("label", [-1, 1], "int64")
        y = net(x)
        y = layers.fc(y, classes) if y.shape[-1] != classes or len(y.shape) > 2 else y
        loss = layers.mean(layers.softmax_with_cross_entropy(y, label))
        _UPDATES[update]().minimize(loss)
    feed: Feed = {"x": random.standard_normal((batch, *shape), np.float32), "label": random.integers(0, classes, (batch, 1))}
    return CalibrationProgram(main, startup, feed, [loss])


def _dense(widths: Sequence[int], x: Any) -> Any:
    for k, width in enumerate(widths):
        x = layers.fc(x, width, act="relu" if k < len(widths) - 1 else None)
    return x


def _convolved(plan: Sequence[tuple[int, int, int, str]], x: Any) -> Any:
    for filters, size, stride, then in plan:
        before, norm = x, "n" in then
        x = layers.conv2d(x, filters, size, stride, size // 2 if norm else 0, bias_attr=False if norm else None)
        if norm:
            x = layers.batch_norm(x)
        if "r" in then:
            x = layers.elementwise_add(x, before)
        if "l" not in then:
            x = layers.relu(x)
        if "p" in then:
            x = layers.pool2d(x, 2, "max", 2)
    if x.shape[-1] < 8:
        x = layers.pool2d(x, pool_type="avg", global_pooling=True)
    return layers.flatten(x)


def _transformer(batch: int, tokens: int, width: int, heads: int) -> CalibrationProgram:
    """Two layers of a transformer over tokens, with a loss for each token."""
    name, vocabulary = f"transformer {width}", 768
    main, startup = Program(name), Program(f"{name} startup")
    main.random_seed = startup.random_seed = 1
    random = np.random.default_rng(0)
    with guard(), program_guard(main, startup):
        ids, label = (data(n, [-1, tokens, *last], "int64") for n, last in (("ids", ()), ("label", (1,))))
        x = layers.embedding(ids, [vocabulary, width])
        for _ in range(2):
            x = layers.elementwise_add(x, _attention(layers.layer_norm(x, begin_norm_axis=2), heads, width))
            h = layers.fc(layers.layer_norm(x, begin_norm_axis=2), 4 * width, num_flatten_dims=2, act="gelu")
            x = layers.elementwise_add(x, layers.fc(h, width, num_flatten_dims=2))
        y = layers.fc(layers.layer_norm(x, begin_norm_axis=2), vocabulary, num_flatten_dims=2)
        loss = layers.mean(layers.softmax_with_cross_entropy(y, label))
        _UPDATES["adam"]().minimize(loss)
    feed: Feed = {"ids": random.integers(0, vocabulary, (batch, tokens)), "label": random.integers(0, vocabulary, (batch, tokens, 1))}
    return CalibrationProgram(main, startup, feed, [loss])


def _attention(x: Any, heads: int, width: int) -> Any:
    qkv = layers.split(layers.fc(x, 3 * width, num_flatten_dims=2), 3, dim=2)
    q, k, v = (layers.transpose(layers.reshape(part, [0, 0, heads, width // heads]), [0, 2, 1, 3]) for part in qkv)
    mixed = layers.transpose(layers.scaled_dot_product_attention(q, k, v, causal=True), [0, 2, 1, 3])
    return layers.fc(layers.reshape(mixed, [0, 0, width]), width, num_flatten_dims=2)
