"""group_norm and instance_norm against each other and a float64 formula."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramError, TensorType
from fluidx.ops.nn.group_norm import GroupNorm, GroupNormGrad, InstanceNorm, InstanceNormGrad

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def test_group_norm_with_one_channel_per_group_is_instance_norm(run_bound):
    rng = np.random.default_rng(0)
    x, scale, bias = normal(rng, 2, 3, 4, 2), normal(rng, 3), normal(rng, 3)
    y, mean, var = run_bound(GroupNorm, x, scale, bias, groups=3)
    z, saved, inv = run_bound(InstanceNorm, x, scale, bias)
    assert (y == z).all() and (mean.reshape(-1) == saved).all()
    np.testing.assert_allclose(inv, 1 / np.sqrt(var.reshape(-1) + 1e-5), rtol=1e-6)
    np.testing.assert_allclose((y[1, 2] - bias[2]) / scale[2], (x[1, 2] - x[1, 2].mean()) / np.sqrt(x[1, 2].var() + 1e-5), **CLOSE)


@pytest.mark.parametrize("op, grad, attrs", [(GroupNorm, GroupNormGrad, {"groups": 3}), (InstanceNorm, InstanceNormGrad, {})])
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(run_bound, op, grad, attrs):
    x, weight = np.ones((0, 6, 4), "float32"), np.ones(6, "float32")
    y, *stats = run_bound(op, x, weight, weight, **attrs)
    assert y.shape == x.shape and all(s.size == 0 for s in stats)
    dx, dscale, dbias = run_bound(grad, x, weight, weight, *stats, x, **attrs)
    assert dx.shape == x.shape and not dscale.any() and not dbias.any()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("pixels", [(0,), (2, 0), (0, 3, 0)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_images_without_pixels_give_an_empty_result_and_zero_gradients(run_bound, groups, pixels, layout):
    shape, weight = (2, 4, *pixels) if layout == "NCHW" else (2, *pixels, 4), np.ones(4, "float32")
    x, stat = np.ones(shape, "float32"), np.ones((2, groups), "float32")
    assert run_bound(GroupNorm, x, weight, weight, groups=groups, data_layout=layout)[0].shape == shape
    dx, *more = run_bound(GroupNormGrad, x, weight, weight, stat, stat, x, groups=groups, data_layout=layout)
    assert dx.shape == shape and all(d.shape == (4,) and not d.any() for d in more)


def test_an_open_size_may_be_0_when_it_is_fed():
    y = fx.layers.group_norm(fx.data("x", [-1, 4, -1], "float32"), 2)
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    for n in (3, 0, 1):
        assert exe.run(feed={"x": np.ones((2, 4, n), "float32")}, fetch_list=[y])[0].shape == (2, 4, n)


@pytest.mark.parametrize(
    "op, shapes, attrs, message",
    [
        (GroupNorm, [(2, 3, 4), None, None], {"groups": 2}, "groups 2 must divide the 3 channels"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, shapes, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*(s and TensorType("float32", s) for s in shapes), **op.complete_attrs(attrs))
