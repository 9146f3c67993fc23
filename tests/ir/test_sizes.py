"""Which open axes have one size."""

from __future__ import annotations

import pytest

import fluidx as fx
from fluidx.ir import Builder
from fluidx.ir.sizes import StandInShapes


@pytest.fixture
def b():
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        yield Builder(main.global_block())


def test_the_batch_has_one_size_in_all_data_and_in_what_comes_of_it(b):
    x, y = fx.data("x", [-1, 4], "float32"), fx.data("y", [-1, 4], "float32")
    turned = b.transpose(b.transpose(b.exp(x), axis=(1, 0)), axis=(1, 0))
    assert b.sizes.equal(turned, y)


def test_cutting_rows_makes_another_size(b):
    x = fx.data("x", [-1, 4], "float32")
    first, rest = b.slice(x, axes=[0], starts=[0], ends=[1]), b.slice(x, axes=[0], starts=[1], ends=[100])
    assert x.shape == first.shape == rest.shape == (-1, 4)
    assert not b.sizes.equal(x, first) and not b.sizes.equal(x, rest) and not b.sizes.equal(first, rest)
    assert b.sizes.equal(rest, b.relu(rest))


def test_open_axes_behind_the_batch_are_sizes_of_their_own(b):
    x, y = fx.data("x", [-1, -1], "float32"), fx.data("y", [-1, -1], "float32")
    assert not b.sizes.equal(x, y) and b.sizes.equal(x, y, stop=1) and b.sizes.equal(x, b.relu(x))


def test_rows_that_are_folded_and_unfolded_are_the_same_rows(b):
    x = fx.data("x", [-1, 6], "float32")
    pairs = b.reshape(x, shape=(-1, 3))
    assert not b.sizes.equal(pairs, b.slice(x, axes=[1], starts=[0], ends=[3]))
    assert b.sizes.equal(x, b.reshape(b.relu(pairs), shape=(-1, 6)))


def test_a_size_that_depends_on_values_or_on_a_branch_equals_only_itself(b):
    x, flag = fx.data("x", [-1, 2], "float32"), fx.data("flag", [1], "bool")
    y = fx.layers.cond(flag, lambda: x * 2.0, lambda: x)
    assert not b.sizes.equal(x, y) and b.sizes.equal(y, b.relu(y))


def test_a_variable_that_is_written_in_place_keeps_the_size_of_its_first_writer(b):
    x = fx.data("x", [-1, 2], "float32")
    h = b.relu(x)
    b.increment(h, out={"Out": h})
    assert b.sizes.equal(x, h) and StandInShapes(h.block).equal(x, b.exp(h))


def test_values_that_are_computed_after_the_first_question_are_known_too(b):
    x = fx.data("x", [-1, 2], "float32")
    assert b.sizes.equal(x, b.relu(x))
    assert b.sizes.equal(x, b.relu(b.exp(x)))
