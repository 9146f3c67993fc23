"""Operators that are written by the function bodies of their schemas: they have gradients like all others."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from tests.onnx.one_node import check_gradient  # noqa: E402


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("attrs", [{}, {"is_causal": 1}, {"softcap": 2.0}])
def test_attention(attrs):
    check_gradient("Attention", [normal(2, 4, 3, 5), normal(2, 2, 6, 5), normal(2, 2, 6, 4)], wrt=(0, 1, 2), **attrs)


def test_attention_of_rows_that_hold_all_heads():
    mask = np.random.default_rng(0).random((3, 6)) < 0.7
    operands = [normal(2, 3, 8), normal(2, 6, 4), normal(2, 6, 6), mask]
    check_gradient("Attention", operands, wrt=(0, 1, 2), known=(3,), q_num_heads=4, kv_num_heads=2, scale=0.3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction):
    scores, labels, weights = normal(4, 3), ids(2, 0, 1, 2), np.array([0.5, 1.0, 2.0])
    attrs = {"reduction": reduction, "ignore_index": 1}
    check_gradient("SoftmaxCrossEntropyLoss", [scores, labels, weights], wrt=(0,), known=(1,), **attrs)
    check_gradient("NegativeLogLikelihoodLoss", [scores, labels, weights], wrt=(0,), known=(1,), **attrs)


def test_affine_grid():
    check_gradient("AffineGrid", [normal(2, 2, 3), ids(2, 1, 3, 4)], known=(1,))


def test_rotary_embedding():
    places = ids(0, 1, 2, 3, 1, 2, 3, 4).reshape(2, 4)
    check_gradient("RotaryEmbedding", [normal(2, 3, 4, 6), normal(5, 3), normal(5, 3), places], known=(1, 2, 3))
