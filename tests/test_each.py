"""Cases in one test are all run, and those that fail are named."""

import inspect

import pytest

from tests.each import each

seen = []


@each("a, b", [(1, 2), (2, 2), (3, 4)])
@each("c", ["x", "y"])
def all_equal(a, b, c, fixture):
    seen.append((a, b, c, fixture))
    assert a == b or c == "y"


def test_every_case_is_run_and_those_that_fail_are_named():
    with pytest.raises(ExceptionGroup, match="2 of 3 cases fail") as error:
        all_equal(fixture=0)
    assert seen == [(a, b, c, 0) for a, b in ((1, 2), (2, 2), (3, 4)) for c in "xy"]
    assert [e.__notes__ for e in error.value.exceptions] == [["with c = x", "with a = 1, b = 2"], ["with c = x", "with a = 3, b = 4"]]


def test_what_is_left_are_fixtures():
    assert [*inspect.signature(all_equal).parameters] == ["fixture"]
