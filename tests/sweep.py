"""Which combinations of parameters a run of the tests takes: a part in which every value of each is met, and all with FLUIDX_SWEEP=1."""

import os
from itertools import product

import pytest

ALL = os.environ.get("FLUIDX_SWEEP") == "1"


def some(n, *axes):
    """Combinations of the elements of `axes`, one of n: those on diagonals, so that every element stands in one where n is at most as long
    as the longest of the other axes."""
    places = product(*(range(len(axis)) for axis in axes))
    return [tuple(axis[k] for axis, k in zip(axes, at, strict=True)) for at in places if ALL or sum(at) % n == 0]


def swept(n, /, **axes):
    """`pytest.mark.parametrize` over one of n combinations of the axes; the elements of one that is a dict are called by its keys."""
    named = [axis if isinstance(axis, dict) else {getattr(v, "__name__", str(v)): v for v in axis} for axis in axes.values()]
    cases = [
        pytest.param(*(axis[name] for axis, name in zip(named, names, strict=True)), id="-".join(names))
        for names in some(n, *(list(axis) for axis in named))
    ]
    return pytest.mark.parametrize(", ".join(axes), cases)


def examples(few, many):
    """How many random examples are drawn."""
    return many if ALL else few
