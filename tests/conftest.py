"""Every test starts with fresh default programs, names counted from 0, and an empty global scope."""

import gc
import os

import pytest

import fluidx as fx

os.environ.setdefault("FLUIDX_SEED", "0")  # programs of tests that name no seed have this one
# What tests make is many small objects of programs, and most are in use: looking often takes a sixth of the time.
gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def fresh():
    with fx.unique_name.guard(), fx.program_guard(fx.Program("main"), fx.Program("startup")), fx.scope_guard(fx.executor.Scope()):
        yield


@pytest.fixture(scope="session")
def browser():
    """A `tests.browser.Browser`; the test is skipped where none is installed."""
    from tests.browser import PROGRAMS, Browser, find

    if (program := find()) is None:
        pytest.skip(f"no browser is installed: none of {', '.join(PROGRAMS)}")
    opened = Browser(program)
    yield opened
    opened.close()


def pytest_collection_modifyitems(items):
    """GPU tests say why they do not run."""
    reason = _no_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What is there by now stays: the garbage collector need not look through thousands of tests again and again."""
    gc.collect()
    gc.freeze()


def _no_gpu():
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install -e '.[cuda13]')"
    return None if cupy.cuda.is_available() else "CuPy finds no GPU"
