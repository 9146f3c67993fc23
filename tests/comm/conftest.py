"""One suite for both ways in which ranks that are threads meet: in C, and on Python's locks."""

import pytest

from fluidx import native

BOTH = {"test_threads.py", "test_parts.py", "test_operators.py", "test_pace.py"}


def pytest_generate_tests(metafunc):
    if metafunc.definition.path.name in BOTH:
        metafunc.parametrize("way", ["c", "locks"], indirect=True)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """How the ranks of this test meet."""
    chosen = getattr(request, "param", "c")
    if chosen == "locks":
        monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    elif request.path.name in BOTH | {"test_native.py"} and (reason := native.why_not()):
        pytest.skip(reason)
    return chosen


@pytest.fixture(scope="session")
def four_processes():
    """Starts four processes of a kind, such as MpiProcesses, which all tests share."""
    started = {}

    def start(kind):
        if kind not in started:
            started[kind] = kind(4)
        return started[kind]

    yield start
    for job in started.values():
        job.close()
