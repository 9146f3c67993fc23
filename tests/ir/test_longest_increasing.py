"""The longest rising subsequence, against all subsequences."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir.longest_increasing import longest_increasing


def rises(numbers):
    return all(a < b for a, b in zip(numbers, numbers[1:], strict=False))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=8))
def test_it_rises_and_no_longer_one_does(numbers):
    kept = longest_increasing(numbers)
    assert rises(kept) and rises([numbers[k] for k in kept])
    assert len(kept) == max(n for n in range(len(numbers) + 1) if any(map(rises, combinations(numbers, n))))


def test_equal_numbers_do_not_rise():
    assert [len(longest_increasing(numbers)) for numbers in ([], [5], [5, 5, 5], [2, 1])] == [0, 1, 1, 1]
