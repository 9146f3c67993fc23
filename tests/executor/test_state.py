"""One suite for every State: a scope, and ranks that are threads, processes, or processes of a launcher."""

import inspect

import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.ranks.launched_group import LaunchedGroup
from fluidx.executor.ranks.launched_script import LaunchedScript
from fluidx.executor.ranks.process_group import ProcessGroup
from fluidx.executor.ranks.rank_group import OneProcess, RankGroup, ScriptProcesses
from fluidx.executor.ranks.rank_state import RankState
from fluidx.executor.ranks.state import ScopeState, State
from fluidx.executor.ranks.thread_group import ThreadGroup
from fluidx.launch import process_job
from fluidx.native import shared
from tests.executor import state_checks

NO_PROCESSES = native.why_not() or shared.why_not()
HELD = {
    "scope": state_checks.in_scope,
    "threads": lambda: state_checks.on_ranks(fx.cpu_places(2)),
    "processes": lambda: state_checks.on_ranks(fx.process_places(2, imports=["tests.executor.state_checks"])),
}


@pytest.fixture(scope="module", params=HELD)
def held(request):
    if request.param == "processes" and NO_PROCESSES:
        pytest.skip(NO_PROCESSES)
    found, exe = HELD[request.param]()
    yield found
    exe.close()


@pytest.mark.parametrize("check", state_checks.CHECKS)
def test_state(held, check):
    state_checks.CHECKS[check](held)


@pytest.mark.skipif(bool(NO_PROCESSES), reason="processes need the C kernels and shared memory")
def test_the_state_of_launched_ranks(tmp_path):
    (file := tmp_path / "script.py").write_text("import runpy\nrunpy.run_module('tests.executor.state_checks', run_name='__main__')\n")
    said = []
    assert process_job.run(str(file), [], 2, say=said.append, timeout=30.0) == 0, "\n".join(said)


@pytest.mark.parametrize(
    "protocol, body",
    [
        *((State, body) for body in (ScopeState, RankState)),
        *((ScriptProcesses, body) for body in (OneProcess, LaunchedScript)),
        *((RankGroup, body) for body in (ThreadGroup, ProcessGroup, LaunchedGroup)),
    ],
)
def test_every_body_has_the_calls_of_its_protocol(protocol, body):
    """With its parameters, in its order."""
    for name, call in vars(protocol).items():
        if inspect.isfunction(call) and not name.startswith("_"):
            found, wanted = (list(inspect.signature(c).parameters) for c in (getattr(body, name), call))
            assert found == wanted, name
