"""What is dealt to ranks and joined again, and that recipes made for one value serve the next."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.ranks.split_and_join import FeedSplitter
from fluidx.ir import Partial, Shard
from fluidx.ir.parts import cut
from fluidx.ir.types import At

MESH = {"dp": ((0, 1), (2, 3)), "tp": ((0, 2), (1, 3))}


def splitter():
    p = fx.Program()
    p.groups = MESH
    return FeedSplitter([p] * 4)


@pytest.mark.parametrize(
    "placement",
    [
        (Shard(0, "dp"),),
        (Shard(1, "tp"),),
        (Shard(0, "dp"), Shard(1, "tp")),
        (Shard(0, "tp"), Shard(0, "dp")),
        (Partial("sum", "dp"),),
        (Shard(1, "tp"), Partial("sum", "dp")),
        (Partial("sum", "tp"), Shard(0, "dp")),
        (At(1, "dp"),),
    ],
    ids=str,
)
def test_what_is_cut_and_joined_is_the_whole_again(placement):
    d = splitter()
    for seed in range(3):
        whole = np.random.default_rng(seed).integers(-9, 9, (5, 3)).astype("float32")
        for ranks in (range(4), d.holders(placement)):  # whether every rank shows its part, or one for each part
            held = {r: cut(whole, placement, d.coords[r]) for r in ranks if not isinstance(placement[0], At) or d.coords[r]["dp"][0] == 1}
            values = [held.get(r) for r in range(4)]
            assert np.array_equal(d.merge("x", values, placement, whole.shape), whole)
            assert np.array_equal(d.merge("x", values, placement, whole.shape, d.terms(placement, whole.shape, list(held))), whole)


@pytest.mark.parametrize(("op", "want"), [("sum", [6, 60]), ("max", [4, 40]), ("min", [2, 20])])
def test_terms_are_reduced_as_their_placement_says(op, want):
    d = splitter()
    values = [np.array([2, 20], "float32"), np.array([4, 40], "float32"), None, None]
    placement = (Partial(op, "dp"),)
    assert (
        d.merge("x", values, placement, (2,)).tolist()
        == d.merge("x", values, placement, (2,), d.terms(placement, (2,), [0, 1])).tolist()
        == want
    )


def test_a_scalar_is_joined_from_terms():
    d = splitter()
    placement = (Partial("sum", "dp"),)
    assert d.merge("x", [np.array(2.0), np.array(3.0), None, None], placement, (), d.terms(placement, (), [0, 1])) == 5


def test_parts_that_do_not_fit_are_told_apart_by_rank():
    d = splitter()
    good = [np.zeros((3, 2)), np.zeros((3, 2)), None, None]
    with pytest.raises(fx.FeedError) as error:
        d.merge("x", [good[0], np.zeros((4, 5)), None, None], (Shard(0, "dp"),), (6, 2), d.terms((Shard(0, "dp"),), (6, 2), [0, 1]))
    told = "variable 'x' should have shape [6, 2], shard(0) over dp; found [3, 2] on rank 0, [4, 5] on rank 1: "
    assert str(error.value).startswith(told)
    with pytest.raises(fx.FeedError, match="^variable 'x' should have shape .*: no rank holds the value$"):
        d.merge("x", [None] * 4, (Shard(0, "dp"),), (6, 2))


def test_feeds_of_one_kind_are_dealt_by_one_recipe():
    p = fx.Program.parse_from_string("program p {\n group dp = [0, 1]\n data %x: f32[-1,2] shard(0) over dp\n data %whole: f32[3]\n}")
    d, descs = FeedSplitter([p, p]), p.global_block().descs
    one = {"x": np.arange(10, dtype="float32").reshape(5, 2), "whole": np.arange(3, dtype="float32")}
    recipe = d.plan_split(descs, one, "pad")
    for k in range(2):
        feed = {n: a + k for n, a in one.items()}
        a, b = d.split(descs, feed, recipe)
        assert np.array_equal(np.concatenate([a["x"], b["x"]]), np.concatenate([feed["x"], feed["x"][-1:]]))
        assert np.array_equal(a["whole"], feed["whole"]) and np.array_equal(b["whole"], feed["whole"])
        assert d.even_sizes(feed, recipe)["x"].shape == (6, 2)
