"""Tests of the C kernels are skipped, with the reason, where the extension is not built."""

import pytest

from fluidx import native


@pytest.fixture(autouse=True)
def two_threads(request):
    """More than one thread even on one core, and the setting back afterwards."""
    if reason := native.why_not():
        if request.path.name != "test_build.py":
            pytest.skip(reason)
        yield
        return
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)
    native.use_threads(0)


@pytest.fixture(params=["base", "v3", "v4"])
def level(request):
    """Every level of instructions that this processor has, one after the other."""
    if request.param not in native.levels():
        pytest.skip(f"this processor lacks {request.param}")
    with native.at_level(request.param):
        yield request.param
