"""Layers of every kind."""

from __future__ import annotations

from typing import Any

import fluidx as fx

from .base import L, attr, fc, integers, mask, model, real, whole


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
