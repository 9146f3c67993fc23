"""Programs without a seed begin anew in every job, all ranks alike, and the seed that was drawn is said once."""

import re

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.comm import launch_environment
from fluidx.launch import process_job
from fluidx.native import shared

SAID = r"fluidx: no seed: drew (\d+); set random_seed of the programs, or FLUIDX_SEED=\1 to repeat this run\n"


@pytest.fixture
def new_process(monkeypatch):
    """Whatever was drawn is forgotten, as in a process that begins."""
    monkeypatch.delenv("FLUIDX_SEED")

    def begin(**environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        launch_environment._drawn.cache_clear()

    begin()
    yield begin
    launch_environment._drawn.cache_clear()


def first_values(seed=0):
    main, startup = fx.Program(), fx.Program()
    startup.random_seed = seed
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3)
    with fx.scope_guard(fx.Scope()):
        fx.Executor().run(startup)
        return fx.global_scope().get("fc_0.w_0").copy()


def test_a_job_without_a_seed_draws_one_and_says_it_once(new_process, capsys):
    one, again = first_values(), first_values()
    assert np.array_equal(one, again)  # of one job
    out, err = capsys.readouterr()
    assert out == "" and (said := re.fullmatch(SAID, err))
    new_process()
    assert not np.array_equal(first_values(), one)
    new_process(FLUIDX_SEED=said[1])
    capsys.readouterr()
    assert np.array_equal(first_values(), one)
    assert capsys.readouterr() == ("", "")


def test_a_seed_of_the_program_is_exact_and_nothing_is_said(new_process, capsys):
    one = first_values(seed=7)
    new_process()
    assert np.array_equal(first_values(seed=7), one) and capsys.readouterr() == ("", "")
    new_process(FLUIDX_SEED="3")
    assert np.array_equal(first_values(seed=7), one)
    assert np.array_equal(first_values(), first_values(seed=3))


def test_what_draws_nothing_needs_no_seed(new_process, capsys):
    with fx.program_guard(fx.Program(), fx.Program()):
        for initializer in (fx.initializer.Constant(1.0), fx.initializer.NumpyArrayInitializer(np.ones((4, 3), "float32"))):
            fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3, param_attr=fx.ParamAttr(initializer=initializer), bias_attr=False)
    assert capsys.readouterr() == ("", "")


def test_ranks_of_a_job_have_one_seed_and_the_first_says_it(new_process, capsys):
    """By the seed that their launcher drew, or by what their job has in common."""
    for environ in ({"FLUIDX_JOB_SEED": "1234"}, {"FLUIDX_JOB_SEED": "", "FLUIDX_JOB": "a"}):
        found = []
        for rank in ("0", "1"):
            new_process(FLUIDX_RANK=rank, FLUIDX_WORLD_SIZE="2", **environ)
            found.append(first_values())
        assert np.array_equal(*found)
        err = capsys.readouterr().err
        assert len(re.findall(SAID, err)) == 1 and ("drew 1234;" in err) == bool(environ["FLUIDX_JOB_SEED"])
    new_process(FLUIDX_JOB="b")
    assert not np.array_equal(first_values(), found[0])


SCRIPT = """
import sys
import fluidx as fx
from fluidx.comm.launched_rank import member

fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3)
exe = fx.Executor()
exe.run(fx.default_startup_program())
values = member().gather(fx.global_scope().get("fc_0.w_0").tolist())
assert values[0] == values[1]
with open(f"{sys.argv[1]}/values", "a") as file:
    file.write(f"{values[0]}\\n" if fx.rank() == 0 else "")
if "again" in sys.argv and fx.ir is not None and __import__("os").environ["FLUIDX_RESTART"] == "0":
    raise SystemExit(3)
"""


@pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
def test_a_launched_job_keeps_its_seed_when_it_is_started_again(new_process, tmp_path):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    said = []
    for _ in range(2):
        assert process_job.run(str(script), [str(tmp_path), "again"], 2, restarts=1, say=said.append, timeout=20.0) == 0, said
    one, restarted, other, again = (tmp_path / "values").read_text().splitlines()
    assert one == restarted != other == again
