"""Normalizations and softmax. `norm_formulas` exports most normalizations."""

from __future__ import annotations

from typing import Any

from ...ir import ANY
from ...ir.dtypes import HALVES, np_dtype
from ..node import Node
from ..table import OneToOne, entry, imports
from ..values import dtype_code


def _softmax(made: OneToOne, n: Node) -> Any:
    return n.by_body() if n.dtype() in HALVES else made.read(n)  # the operator's definition rounds each step to 16 bits


entry("Softmax", "softmax", read=_softmax, axis=-1)
entry("LogSoftmax", "log_softmax", read=_softmax, axis=-1)


@imports("BatchNormalization", statistics={3: "running_mean", 4: "running_var"})
def batch_norm(n: Node) -> object:
    training = bool(n.attr("training_mode", 0))
    weights = [_in_dtype(n, k) for k in range(1, 5)]
    y, mean, variance, *_ = n.b.batch_norm(n.x(), *weights, epsilon=n.attr("epsilon", 1e-5), momentum=n.attr("momentum", 0.9),
                                           is_test=not training)  # fmt: skip
    return (y, n.cast(mean, n.dtype(3)), n.cast(variance, n.dtype(4))) if training else y


@imports("InstanceNormalization")
def instance_norm(n: Node) -> object:
    return n.b.instance_norm(n.x(), _in_dtype(n, 1), _in_dtype(n, 2), epsilon=n.attr("epsilon", 1e-5))[0]


@imports("LayerNormalization")
def layer_norm(n: Node) -> object:
    x, rank, epsilon = n.x(), n.rank(), n.attr("epsilon", 1e-5)
    axis = n.attr("axis", -1) % rank
    rows = n.shape(0)[axis:]
    if axis == 0 or ANY in rows or not _in_one_dtype(n) or any(n.has(k) and n.shape(k) != rows for k in (1, 2)):
        return n.by_body()
    scale, bias = (n.b.reshape(n.x(k), shape=(-1,)) if n.has(k) and len(rows) > 1 else n.x(k) for k in (1, 2))
    y, mean, variance = n.b.layer_norm(x, scale, bias, begin_norm_axis=axis, epsilon=epsilon)
    ones = tuple(range(axis, rank))
    mean = n.b.unsqueeze(mean, axes=ones) if n.wants(1) else None
    inverse = n.b.unsqueeze(n.b.rsqrt(n.b.scale(variance, bias=epsilon)), axes=ones) if n.wants(2) else None
    return y, mean, inverse


@imports("RMSNormalization")
def rms_norm(n: Node) -> object:
    axis = n.attr("axis", -1) % n.rank()
    rows = n.shape(0)[axis:]
    if axis == 0 or ANY in rows or not _in_one_dtype(n) or n.shape(1) != rows:
        return n.by_body()
    scale = n.b.reshape(n.x(1), shape=(-1,)) if len(rows) > 1 else n.x(1)
    return n.b.rms_norm(n.x(), scale, begin_norm_axis=axis, epsilon=n.attr("epsilon", 1e-5))[0]


@imports("GroupNormalization")
def group_norm(n: Node) -> object:
    if not _in_one_dtype(n):
        return n.by_body()
    return n.b.group_norm(n.x(0), n.x(1), n.x(2), groups=n.attr("num_groups"), epsilon=n.attr("epsilon", 1e-5))[0]


def _in_one_dtype(n: Node) -> bool:
    """Do all operands have the dtype of the computation?"""
    work = dtype_code(np_dtype(n.dtype(0))) if n.dtype(0) not in HALVES else None
    return n.attr("stash_type", 1) == work and all(n.dtype(k) == n.dtype(0) for k in range(len(n.operands)) if n.has(k))


def _in_dtype(n: Node, k: int) -> Any:
    """Weight k in the dtype of X, or in float32 if X has 16 bits. Other weights are cast."""
    fits = (n.dtype(0), "float32" if n.dtype(0) in HALVES else n.dtype(0))
    return n.x(k) if n.dtype(k) in fits else n.cast(n.x(k), fits[-1])


@imports("LRN")
def lrn(n: Node) -> object:
    size = n.attr("size")
    return n.b.lrn(n.x(), n=size, k=n.attr("bias", 1.0), alpha=n.attr("alpha", 1e-4) / size, beta=n.attr("beta", 0.75))[0]


@imports("LpNormalization")
def lp_norm(n: Node) -> object:
    x, p, axis = n.x(), n.attr("p", 2), n.attr("axis", -1)
    size = n.b.reduce_sum(n.b.square(x) if p == 2 else n.b.abs(x), dim=(axis,), keep_dim=True)
    nothing = n.b.equal(size, n.const(0, np_dtype(n.dtype(0))))  # zeros stay zeros
    size = n.b.where(nothing, n.const(1, np_dtype(n.dtype(0))), size)
    return n.b.elementwise_div(x, n.b.sqrt(size) if p == 2 else size)
