"""Annotated for tensor parallelism."""

from __future__ import annotations

from typing import Any

import fluidx as fx
from fluidx.ir import Shard

from .base import L, attr, fc, integers, model, real


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


@model
def mesh_classes() -> None:
    """A table cut by words, looked up and used again as the last layer: the classes of the loss are cut."""
    ids, label = integers("ids", 6, 3), integers("label", 6, 3, 1)
    h = L.embedding(ids, [6, 4], param_attr=attr("table", placement=Shard(0, "tp")), dtype="float64")
    h = L.layer_norm(fc(h, 4, "tanh", num_flatten_dims=2), begin_norm_axis=2)
    logits = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
    fx.optimizer.Momentum(0.1, 0.9).minimize(L.mean(L.softmax_with_cross_entropy(logits, label)))


@model
def mesh_sequence() -> None:
    """Tokens are cut between a column and a row cut, and heads are cut inside of attention whose tokens are cut outside."""
    x, y = real("x", 4, 4), real("y", 4, 4)
    h = L.layer_norm(L.shard(fc(x, 4, num_flatten_dims=2), Shard(1, "tp")), begin_norm_axis=2)
    up = fc(h, 6, "tanh", num_flatten_dims=2, param_attr=attr("up", placement=Shard(1, "tp")), bias_attr=False)
    h = h + L.shard(fc(up, 4, num_flatten_dims=2, param_attr=attr("down", placement=Shard(0, "tp"))), Shard(1, "tp"))
    heads = L.transpose(L.reshape(h, [0, 0, 2, 2]), [0, 2, 1, 3])
    q = L.shard(heads, Shard(1, "tp"))
    mixed = L.shard(L.scaled_dot_product_attention(q, q, q, causal=True), Shard(2, "tp"))
    fx.optimizer.Adam(0.02).minimize(L.mean(L.square(L.reshape(L.transpose(mixed, [0, 2, 1, 3]), [0, 0, 4]) - y)))


@model
def mesh_experts() -> None:
    """Experts cut over tp, whose ranks all have the tokens."""
    x, y = real("x", 4, 3), real("y", 4, 3)
    out, balance = L.moe(x, 2, 4, top_k=1, act="tanh", param_attr=[attr(n, placement=Shard(0, "tp")) for n in ("w1", "w2")])
    fx.optimizer.SGD(0.2).minimize(L.mean(L.square(x + out - y)) + L.scale(balance, 0.1))
