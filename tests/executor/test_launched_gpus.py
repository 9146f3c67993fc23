"""Ranks that are processes with a GPU each, which is played (played_gpus.py): what they train, hold and tell."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx import cli, native
from fluidx.comm.base import CommTimeout
from fluidx.comm.launch_environment import Launched
from fluidx.doctor import report
from fluidx.executor import launched_alone
from fluidx.executor.places import array_module, cpu_places
from fluidx.executor.ranks import group_choice
from fluidx.executor.ranks.gpu_devices import DeviceReport, chosen
from fluidx.executor.ranks.launched_script import LaunchedScript
from fluidx.ir.errors import ExecutionError, RankError
from fluidx.native import shared
from fluidx.testing.mpi import MpiProcesses, why_not
from fluidx.testing.processes import ProcessRanks
from tests.comm import fake_nccl
from tests.executor import played_gpus
from tests.executor.bodies import EXACT, cases, of_one_device
from tests.test_run import SCRIPT, command, launched, one_device

pytestmark = pytest.mark.skipif(bool(reason := native.why_not() or shared.why_not()), reason=reason)


@pytest.fixture
def ranks(request):
    """What a function of played_gpus.py gives on each of two ranks."""
    started = ProcessRanks(2, getattr(request, "param", 20.0))
    each = lambda name, *args: started.each(f"{played_gpus.__name__}:{name}", args)  # noqa: E731
    each("be_launched")
    yield each
    started.close()


def test_launched_ranks_train_as_one_device(ranks):
    """Every strategy, on small integers, of which every sum is exact in any order."""
    some = {name: case for name, case in cases(2).items() if case.model in EXACT}
    for found in ranks("train", [*some]):
        for (name, case), values in zip(some.items(), found, strict=True):
            wanted = of_one_device(case.model)
            assert {k: values[k] for k in wanted} == wanted, name


@pytest.mark.mpi
@pytest.mark.skipif(bool(reason := why_not()), reason=reason)
def test_ranks_that_meet_over_mpi_do_so_too():
    """As on several hosts, where they share no memory."""
    job = MpiProcesses(2)
    try:
        played = job.ranks(2, 30.0)
        played.each(f"{played_gpus.__name__}:be_launched")
        names = ["ring_optimizer", "zero3"]
        for found in played.each(f"{played_gpus.__name__}:train", [names]):
            wanted = of_one_device("integers")
            assert [{k: values[k] for k in wanted} for values in found] == [wanted] * len(names)
    finally:
        job.close()


def test_a_process_with_two_gpus_holds_two_ranks(ranks):
    names = ["data_parallel", "ring_optimizer", "zero3"]
    for found in ranks("several", names):
        wanted = of_one_device("integers")
        assert [{k: values[k] for k in wanted} for values in found] == [wanted] * len(names)


def test_a_gpu_that_two_ranks_ask_for_is_refused():
    seen = DeviceReport("a", "a", ("0000:65:00.0", "0000:b3:00.0"), "")
    assert chosen([seen, seen], {}, [1, 0]) == [1, 0]
    with pytest.raises(ExecutionError, match="host a has 2 ranks and 2 GPUs, so ranks 0 and 1 would share one"):
        chosen([seen, seen], {}, [1, 1])


def test_a_gpu_that_a_process_does_not_see_is_named():
    seen = DeviceReport("a", "a", ("0000:65:00.0", "0000:b3:00.0"), "")
    with pytest.raises(ExecutionError, match="rank 1, on host a, asks for GPU 2, and its process sees 2, numbered from 0"):
        chosen([seen, seen], {}, [0, 2])


def test_a_process_that_does_not_come_is_named_by_its_first_rank():
    """Each of two processes has two ranks: process 1 has ranks 2 and 3."""
    member = SimpleNamespace(rank=0, comm=SimpleNamespace(abort=lambda reason: None))
    script = LaunchedScript(member, 2)

    def meet():
        raise CommTimeout("rank 0 waited; rank 1 did not arrive", 1)

    with pytest.raises(RankError) as e:
        script.collective(meet)
    assert (e.value.rank, e.value.process) == (2, 1)


@pytest.mark.parametrize("kind", [list, tuple])
def test_programs_of_all_ranks_are_a_list_or_a_tuple(monkeypatch, kind):
    monkeypatch.setattr(launched_alone, "launched_as", lambda: Launched("hand", 0, 2, 2, "a"))
    assert group_choice._ranks_of_each(cpu_places(2), kind([None] * 4)) == 2


def test_each_rank_has_its_variables_on_its_own_gpu(ranks):
    value = np.arange(30.0).reshape(6, 5).tolist()
    assert ranks("hold") == [[f"RankGpu({k})", ["DeviceArray"], value] for k in range(2)]


def test_a_rank_that_fails_ends_the_others_and_is_named(ranks):
    (_, other), (_, own) = ranks("fail", "raise")
    text = "rank 1: op t_faulty failed: ZeroDivisionError: of all things\n  in %"
    assert own.startswith(text) and f"stopped because another rank failed: {text}" in other
    assert all("\n  in step 1" in told for told in (own, other))


@pytest.mark.parametrize("ranks", [2.0], indirect=True)
def test_a_rank_that_does_not_come_to_the_end_of_a_run_is_named(ranks):
    (rank, told), _ = ranks("fail", "late")
    assert rank == 1 and told == "rank 0 waited 2 s in wait_for_all; rank 1 did not arrive\n  in step 1"


# -- fluidx run -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(tmp_path):
    """A folder where processes that are launched find a CuPy."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "from fluidx.comm.launched_rank import member\nfrom tests.executor import played_gpus\nplayed_gpus.install(lambda: member().comm)\n"
    )
    return str(tmp_path)


@pytest.mark.parametrize("strategy", ["ring_optimizer", "zero3"])
def test_a_script_is_the_same_on_gpus(tmp_path, monkeypatch, cupy, strategy):
    monkeypatch.syspath_prepend(cupy)
    monkeypatch.setenv("FLUIDX_DEVICE", "cuda")
    found, said = launched(tmp_path, "save", strategy, ranks=3)
    steps, w = one_device(np.ones((4, 2)))
    assert all(f["steps"] == steps and f["w"] == f["loaded"] == w and f["restored"] == [{"next": 3}, w] for f in found) and said == []


def test_fluidx_run_gives_each_rank_a_gpu(tmp_path, monkeypatch, cupy):
    monkeypatch.setenv("PYTHONPATH", f"{cupy}:{Path(__file__).parents[2]}")
    done = command("-n", 2, "--backend", "nccl", SCRIPT, "data_parallel", tmp_path, "raise")
    assert done.returncode == 1 and done.stderr.startswith("fluidx run: rank 1: ValueError: no more data\n")


@pytest.fixture
def forgetful():
    """What is found in a test is not there in the next."""
    array_module.cache_clear()
    yield
    array_module.cache_clear()


def test_more_ranks_than_gpus_are_refused_before_any_starts(monkeypatch, forgetful):
    for name, module in fake_nccl.modules()[0].items():
        monkeypatch.setitem(sys.modules, name, module)
    done = CliRunner().invoke(cli.main, ["run", "-n", "9", "--backend", "nccl", SCRIPT])
    assert done.exit_code == 2
    assert " has 9 ranks and 8 GPUs, so ranks 0 and 8 would share one; start 8 ranks there" in done.output


def test_the_doctor_sees_gpus_and_nccl(monkeypatch, forgetful):
    for name, module in fake_nccl.modules()[0].items():
        monkeypatch.setitem(sys.modules, name, module)
    assert "cupy: 14.2.0, 8 GPUs: played; NCCL 2.28.9" in report({})


def test_without_cupy_it_is_said_what_to_install(monkeypatch, forgetful):
    monkeypatch.setitem(sys.modules, "cupy", None)
    done = CliRunner().invoke(cli.main, ["run", "-n", "2", "--backend", "nccl", SCRIPT])
    assert done.exit_code == 2 and "--backend nccl: CUDAPlace(0) needs CuPy, which is not installed; in a checkout" in done.output


# -- which GPU is whose -----------------------------------------------------------------------------------------------------------

A = DeviceReport("a", "host a", ("0000:65:00.0", "0000:b3:00.0"), "")
B = A._replace(name="b", host="host b")
FIRST, SECOND = (A._replace(gpus=A.gpus[k : k + 1]) for k in range(2))


@pytest.mark.parametrize(
    "seen, found",
    [
        ([A, A], [0, 1]),
        ([A], [0]),
        ([A, B, A, B], [0, 0, 1, 1]),  # hosts by turns
        ([FIRST, SECOND], [0, 0]),  # each was given its own
        ([A, A, B], [0, 1, 0]),
    ],
)
def test_ranks_of_a_host_have_one_gpu_after_the_other(seen, found):
    assert chosen(seen, {}) == found


@pytest.mark.parametrize(
    "seen, text",
    [
        ([A, B, A, A], "^host a has 3 ranks and 2 GPUs, so ranks 0 and 3 would share one; start 2 ranks there"),
        ([A, B, FIRST, B, FIRST], "^host a has 3 ranks and 2 GPUs, so ranks 0 and 2 would share one"),
        ([A, B._replace(gpus=(), why_not="no driver")], "^rank 1, on host b, cannot use a GPU: no driver$"),
    ],
)
def test_ranks_do_not_share_a_gpu(seen, text):
    with pytest.raises(ExecutionError, match=text):
        chosen(seen, {})


def test_ranks_share_a_gpu_where_nccl_is_told_so():
    assert chosen([FIRST, FIRST], {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}) == [0, 0]
