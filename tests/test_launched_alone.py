"""Scripts that were launched as several ranks, each of which would train by itself: an error, or one warning."""

import warnings

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import launched_alone
from fluidx.launch import process_job
from fluidx.native import shared

L = fx.layers


@pytest.fixture(autouse=True)
def as_rank(monkeypatch):
    """This process as a rank of a job by hand, which has met nobody."""
    monkeypatch.setattr(launched_alone, "_warned", False)

    def be(rank, ranks):
        monkeypatch.setenv("FLUIDX_RANK", str(rank))
        monkeypatch.setenv("FLUIDX_WORLD_SIZE", str(ranks))

    be(0, 4)
    return be


def training():
    loss = L.mean(L.fc(fx.data("x", [-1, 2], "float32"), 1))
    test = fx.default_main_program().clone(for_test=True)
    fx.optimizer.SGD(0.1).minimize(loss)
    return loss, test


FEED = {"x": np.ones((4, 2), "float32")}


@pytest.mark.parametrize("places", [fx.cpu_places(4), fx.process_places(2)], ids=["threads", "processes"])
def test_places_of_each_launched_rank_are_refused(places):
    training()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=len(places))
    with pytest.raises(fx.ExecutionError) as error:
        fx.ParallelExecutor(t, places=places)
    assert str(error.value) == (
        f"the script was launched as 4 ranks (FLUIDX_RANK), and each of them would train alone, on {len(places)} places of its own: "
        f"{', '.join(map(repr, places))}\n"
        "  write ParallelExecutor(t) without places, and transpile with trainers=fx.world_size(); a process that is to "
        "train alone sets FLUIDX_RANK=0 and FLUIDX_WORLD_SIZE=1"
    )


def test_a_process_that_says_it_is_alone_has_its_places(as_rank):
    as_rank(0, 1)
    loss, _ = training()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        assert exe.run(feed=FEED, fetch_list=[loss])[0].shape == (1,)


def test_an_executor_that_trains_on_each_launched_rank_warns_once():
    loss, test = training()
    exe = fx.Executor(fx.CPUPlace())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exe.run(fx.default_startup_program())
        exe.run(test, feed=FEED, fetch_list=[loss])
        assert not seen  # neither gives parameters other values
        for _ in range(2):
            exe.run(feed=FEED, fetch_list=[loss])
    assert [(w.filename, str(w.message)) for w in seen] == [
        (
            __file__,
            "Executor trains program main on one device, and the script was launched as 4 ranks (FLUIDX_RANK): each of them trains all of "
            "it by itself. To train once, over all ranks, give exe.run fx.CompiledProgram(main).with_data_parallel(loss_name=loss.name), "
            "or make ParallelExecutor(t) of a program transpiled with trainers=fx.world_size(); a process that is to train alone sets "
            "FLUIDX_RANK=0 and FLUIDX_WORLD_SIZE=1",
        )
    ]


@pytest.mark.parametrize("rank, ranks", [(1, 4), (0, 1)])
def test_other_ranks_and_a_rank_alone_say_nothing(as_rank, rank, ranks):
    as_rank(rank, ranks)
    loss, _ = training()
    exe = fx.Executor(fx.CPUPlace())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exe.run(fx.default_startup_program())
        exe.run(feed=FEED, fetch_list=[loss])


SCRIPT = """
import warnings
import numpy as np
import fluidx as fx

warnings.simplefilter("error")
loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2], "float32"), 1))
fx.optimizer.SGD(0.1).minimize(loss)
exe, feed = fx.Executor(fx.CPUPlace()), {"x": np.ones((4, 2), "float32")}
exe.run(fx.default_startup_program())
compiled = fx.CompiledProgram(fx.default_main_program()).with_data_parallel(loss_name=loss.name, places=fx.cpu_places(2))
exe.run(compiled, feed=feed, fetch_list=[loss])
exe.run(feed=feed, fetch_list=[loss])  # beside: this rank's own
"""


@pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
def test_a_script_that_trains_over_the_ranks_is_not_warned(tmp_path):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    said = []
    assert process_job.run(str(script), [], 2, say=said.append, timeout=20.0) == 0, said
