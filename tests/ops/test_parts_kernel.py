"""Kernels that a decomposition defines: the memory between their parts, views, and results in the memory of operands."""

import numpy as np

from fluidx.ir import TensorType, opdef
from fluidx.ops import kernels
from fluidx.ops.parts_kernel import parts_scratch


def body(name, natively=False):
    return next(b for b in kernels.bodies(opdef(name), natively=natively) if b.name == "any")


def test_values_between_the_parts_share_memory():
    """Of softmax: the largest logit and the sum of each row take one buffer in turn, the differences and their exponentials another."""
    x = TensorType("float32", (4, 8))
    assert sorted(t.shape for t in parts_scratch(opdef("softmax"), [x], [x], {"axis": -1})) == [(4, 1), (4, 8)]


def test_a_reshaped_value_needs_no_memory_of_its_own():
    """Groups of channels are views of X, so group_norm needs the differences, their squares and two statistics only."""
    x, attrs = TensorType("float32", (2, 4, 3)), dict(opdef("group_norm").complete_attrs({"groups": 2}))
    types = parts_scratch(opdef("group_norm"), [x, None, None], [x, None, None], attrs)
    assert sum(t.numel == x.numel for t in types) == 2 and sum(t.numel for t in types) <= 2 * x.numel + 2 * 4


def test_a_step_computes_in_the_memory_that_the_plan_gives_it():
    d, x, y = opdef("softmax"), np.float32([[0, 0, np.log(2)]]), np.empty((1, 3), "float32")
    scratch = [np.full(t.shape, np.nan, t.dtype) for t in body("softmax").scratch([TensorType("float32", x.shape)] * 1, [y], {"axis": -1})]
    step = kernels.bind(d, np, [x], [y], {"axis": -1}, None, name="any", scratch=scratch)
    for _ in range(2):
        step()
        np.testing.assert_allclose(y, [[0.25, 0.25, 0.5]], rtol=1e-6)
    assert all(np.isfinite(a).all() for a in scratch)


def test_memory_of_other_sizes_is_not_used():
    d, x, y = opdef("softmax"), np.zeros((2, 2), "float32"), np.empty((2, 2), "float32")
    other = np.full(7, np.nan, "float32")
    kernels.bind(d, np, [x], [y], {"axis": -1}, None, name="any", scratch=[other])()
    assert (y == 0.5).all() and np.isnan(other).all()


def test_empty_results_are_left_alone():
    d, x = opdef("softmax"), np.empty((0, 3), "float32")
    kernels.bind(d, np, [x], [x.copy()], {"axis": -1}, None, name="numpy")()


def test_the_parts_of_parts_are_written_out_too():
    """batch_norm is written with operators that are themselves written out: its plan has operators with kernels of their own only."""
    x, c = np.float32([[1], [3]]), np.ones(1, "float32")
    outs = [np.empty_like(x), *(np.empty(1, "float32") for _ in range(4))]
    attrs = dict(opdef("batch_norm").complete_attrs({"epsilon": 0.0, "momentum": 0.5}))
    opdef("batch_norm").kernel(np, x, c, 0 * c, c, c, out=tuple(outs), **attrs)
    assert [o.ravel().tolist() for o in outs] == [[-1, 1], [1.5], [1], [2], [1]]  # mean 2, variance 1
