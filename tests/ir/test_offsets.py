"""Offsets: flat ranges of ranks, from what rank k has: elements offsets[k] to offsets[k + 1]."""

import pickle
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidx.ir import Pieces
from fluidx.ir.offsets import Offsets

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def of(sizes):
    return Offsets(accumulate(sizes, initial=0))


@given(sizes)
def test_the_ranks_with_elements_are_those_whose_range_is_not_empty(sizes):
    assert of(sizes).filled == tuple(k for k, size in enumerate(sizes) if size)
    assert of(sizes).rising


@given(sizes)
def test_sizes_by_rank_give_the_offsets_that_the_sums_of_sizes_are(sizes):
    made = Offsets.of_sizes({k: size for k, size in enumerate(sizes) if size or k % 2}, len(sizes))
    assert made == of(sizes) and made.filled == of(sizes).filled


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1, max_size=4)))
def test_joined_a_rank_has_its_elements_of_all_values(values):
    got = Offsets.joined([of(v) for v in values])
    assert [b - a for a, b in pairwise(got)] == [sum(column) for column in zip(*values, strict=True)]
    assert got.filled == Offsets(got).filled


@given(sizes, st.data())
def test_within_each_value_a_rank_has_the_elements_of_its_range_that_fall_into_it(held, data):
    owner = [k for k, size in enumerate(held) for _ in range(size)]  # of each element
    cuts = sorted(data.draw(st.lists(st.integers(0, len(owner)), max_size=4)))
    values = [b - a for a, b in pairwise([0, *cuts, len(owner)])]
    found, start = list(Offsets.within(of(held), values)), 0
    for size, offsets in zip(values, found, strict=True):
        assert [b - a for a, b in pairwise(offsets)] == [owner[start : start + size].count(k) for k in range(len(held))]
        assert offsets.filled == Offsets(offsets).filled
        start += size


@pytest.mark.parametrize("wrong", [(1, 2), (0, 2, 1), ()])
def test_numbers_that_fall_or_begin_elsewhere_are_no_offsets(wrong):
    assert not Offsets(wrong).rising


def test_they_are_equal_to_the_tuple_and_written_like_it():
    offsets = Offsets((0, 2, 2, 3))
    assert offsets == (0, 2, 2, 3) and hash(offsets) == hash(Offsets([0, 2, 2, 3])) and str(offsets) == "(0, 2, 2, 3)"
    again = pickle.loads(pickle.dumps(offsets))
    assert again == offsets and again.filled == (0, 2)
    assert Pieces((0, 1, 4), "dp") == Pieces(Offsets((0, 1, 4)), "dp")


@given(sizes)
def test_every_number_is_found_by_its_place(sizes):
    numbers = list(accumulate(sizes, initial=0))
    offsets = Offsets(numbers)
    assert [offsets[k] for k in range(len(numbers))] == numbers == [*offsets]
    assert [offsets[k] for k in range(-len(numbers), 0)] == numbers and offsets[1:] == tuple(numbers[1:])
    assert dict(offsets.sizes()) == {k: size for k, size in enumerate(sizes) if size}
    with pytest.raises(IndexError):
        offsets[len(numbers)]
