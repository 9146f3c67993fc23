"""Dropout drops the given fraction, the same elements for any number of ranks, and its gradient uses the mask."""

from types import SimpleNamespace

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, opdef
from fluidx.ir.parts import Part
from fluidx.ops.shared import random_numbers as random


def context(step=0):
    return SimpleNamespace(step=step, key=step, rank=0, world_size=1)


def test_kept_elements_are_unchanged_or_scaled_up(run_op):
    x = np.arange(1, 9, dtype="float32")
    y, mask = run_op("dropout", x, dropout_prob=0.5, seed=1)
    assert mask.dtype == np.uint8 and y.tolist() == (x * mask).tolist() and 0 < mask.sum() < 8
    y, again = run_op("dropout", x, dropout_prob=0.5, seed=1, dropout_implementation="upscale_in_train")
    assert again.tolist() == mask.tolist() and y.tolist() == (2 * x * mask).tolist()
    assert run_op("dropout_grad", mask, x, dropout_prob=0.5).tolist() == (x * mask).tolist()
    assert run_op("dropout_grad", mask, x, dropout_prob=0.5, dropout_implementation="upscale_in_train").tolist() == (2 * x * mask).tolist()


def test_inference_scales_down_or_changes_nothing(run_op):
    x = np.array([4, 8], "float32")
    assert run_op("dropout", x, dropout_prob=0.25, is_test=True)[0].tolist() == [3, 6]
    assert run_op("dropout", x, dropout_prob=0.25, is_test=True, dropout_implementation="upscale_in_train")[0].tolist() == [4, 8]


@pytest.mark.parametrize("implementation", ["downgrade_in_infer", "upscale_in_train"])
def test_the_probabilities_0_and_1_are_exact(implementation, run_op):
    x = np.ones(1000, "float32")
    assert run_op("dropout", x, dropout_prob=0.0, dropout_implementation=implementation)[0].tolist() == x.tolist()
    y, mask = run_op("dropout", x, dropout_prob=1.0, dropout_implementation=implementation)
    assert not y.any() and not mask.any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_fraction_of_dropped_elements(p, run_op):
    mask = run_op("dropout", np.ones(300_000, "float32"), dropout_prob=p, seed=9)[1]
    assert mask.mean() == pytest.approx(1 - p, abs=0.005)  # five standard deviations


def test_each_run_drops_other_elements(run_op):
    x = np.ones(64, "float32")
    masks = {tuple(run_op("dropout", x, dropout_prob=0.5, seed=1, ctx=context(step))[1].tolist()) for step in range(4)}
    assert len(masks) == 4


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 3, 6)])
def test_ranks_drop_what_one_device_drops(cuts, run_op, monkeypatch):
    monkeypatch.setattr(random, "rounds", lambda xp: random.PHILOX._replace(chunk=16))
    x = np.ones((6, 5, 3), "float32")
    whole = run_op("dropout", x, dropout_prob=0.5, seed=7, ctx=context(3))[1]
    for a, b in zip(cuts, cuts[1:]):
        here = Part(box=((a, b), (0, 5), (0, 3)), shape=x.shape)
        part = run_op("dropout", x[a:b], dropout_prob=0.5, seed=7, part=here, ctx=context(3))[1]
        assert part.tolist() == whole[a:b].tolist()
    folded = x[2:5].reshape(15, 3)  # the batch merged with another axis: still rows of the batch
    here = Part(box=((10, 25), (0, 3)), shape=(30, 3))
    part = run_op("dropout", folded, dropout_prob=0.5, seed=7, part=here, ctx=context(3))[1]
    assert part.tolist() == whole[2:5].reshape(15, 3).tolist()


def test_a_missing_mask_changes_nothing():
    d, x, y = opdef("dropout"), np.ones(20, "float32"), np.empty(20, "float32")
    attrs = d.complete_attrs({"dropout_prob": 0.5, "seed": 2})
    d.kernel(np, x, out=(y, None), ctx=context(), **attrs)
    z, mask = np.empty(20, "float32"), np.empty(20, "uint8")
    d.kernel(np, x, out=(z, mask), ctx=context(), **attrs)
    assert y.tolist() == z.tolist()


def test_wrong_attributes():
    d = opdef("dropout")
    attrs = d.complete_attrs({"dropout_prob": 0.5})
    with pytest.raises(ProgramError, match="dropout_prob must be from 0 to 1, found 1.5"):
        d.infer(TensorType("float32", (8,)), **{**attrs, "dropout_prob": 1.5})
    with pytest.raises(ProgramError, match="must be downgrade_in_infer or upscale_in_train, found 'scale'"):
        d.infer(TensorType("float32", (8,)), **{**attrs, "dropout_implementation": "scale"})


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_part_along_any_axis_keeps_the_elements_of_one_device(axis, run_op):
    x = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("float32")
    want, mask = run_op("dropout", x, dropout_prob=0.5, seed=7, ctx=context(3))
    box = [(0, d) for d in x.shape]
    box[axis] = (1, 3)
    window = tuple(slice(a, b) for a, b in box)
    part = np.ascontiguousarray(x[window])
    out = np.empty_like(part), np.empty(part.shape, "uint8")
    attrs = opdef("dropout").complete_attrs({"dropout_prob": 0.5, "seed": 7})
    opdef("dropout").kernel(np, part, out=out, ctx=context(3), part=Part(box=tuple(box), shape=x.shape), **attrs)
    assert (out[0] == want[window]).all() and (out[1] == mask[window]).all()
