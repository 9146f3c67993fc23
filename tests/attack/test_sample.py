"""A sample of `make attack`: some cases of each engine, from a seed of their own."""

import numpy as np
import pytest

from .engine import ENGINES, batch
from .kernels import differ

CASES = {"programs": 12, "kernels": 120, "files": 60}


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_found(engine):
    found = batch(engine, list(range(CASES[engine])), seed=7)
    assert found.wrong == [] and sum(found.verdicts.values()) == CASES[engine]


def test_a_finding_is_told_with_what_tries_it_again(monkeypatch):
    monkeypatch.setitem(ENGINES, "kernels", (lambda number, seed, outcome: 1 / 0, 1, ""))
    assert batch("kernels", [3], seed=1).wrong[0].startswith("--only 3: ZeroDivisionError")


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("a, b, same", [(1.0, 1.001, True), (1.0, 1.1, False), (NAN, 0.0, False), (INF, INF, True), (-INF, INF, False)])
def test_results_are_compared_as_numbers(a, b, same):
    assert (differ(np.float32([a]), np.float32([b]), 2e-3) == "") is same
