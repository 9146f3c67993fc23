"""Ranks over MPI: what threads give they give, bit for bit, in shared memory and between two hosts."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx.comm.mpi import mpirun
from fluidx.testing.mpi import MpiProcesses, why_not
from tests.comm.hosts import two_hosts
from tests.executor import bodies, mpi_jobs
from tests.sweep import ALL, some

SCRIPT = str(Path(__file__).with_name("mpi_script.py"))
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(reason := why_not()), reason=reason)]


@pytest.fixture(scope="module", params=["2 ranks", "4 ranks", "4 ranks on 2 hosts"] if ALL else ["4 ranks on 2 hosts"])
def ranks(request, tmp_path_factory):
    n = int(request.param[0])
    with ExitStack() as stack:
        where = stack.enter_context(two_hosts(tmp_path_factory.mktemp("hosts"), n // 2)) if "hosts" in request.param else ()
        processes = MpiProcesses(n, *where)
        stack.callback(processes.close)
        yield processes.ranks(n, 30.0)


def job(ranks, name, *args):
    return ranks.each(f"{mpi_jobs.__name__}:{name}", args)


def test_strategies_give_the_bits_of_threads(ranks):
    n = len(ranks.channels)
    names = [name for (name,) in some(6, [*bodies.cases(n)])]
    wanted = [bodies.of_ranks(bodies.cases(n)[name], fx.cpu_places(n)) for name in names]
    for found in ranks.each(f"{bodies.__name__}:over_mpi", [names]):
        assert dict(zip(names, found, strict=True)) == dict(zip(names, wanted, strict=True))


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_what_is_rounded_is_rounded_alike_and_may_be_sent_beside_compute(ranks, overlap):
    found = job(ranks, "beside_over_mpi", overlap)
    assert found == [mpi_jobs.beside(fx.cpu_places(len(found)), overlap)] * len(found)


def test_state_is_set_and_read_and_every_rank_sees_what_each_fetched(ranks):
    found = job(ranks, "state_goes_in_and_out")
    assert all(rank == found[0] for rank in found) and all(value is not None for value in found[0])


def test_each_rank_saves_its_part_and_a_folder_that_hosts_do_not_share_is_refused(ranks, tmp_path):
    found = job(ranks, "checkpoints", str(tmp_path))
    assert sorted(os.listdir(tmp_path / "step-0000000002"))[2:] == [f"rank-{r:05d}.safetensors" for r in range(len(found))]
    if len(found) > 2:  # the third one, and those behind it, have another folder
        said = r"on \S+, is not visible on (\S+); the checkpoint would lack rank-00002\.safetensors of \1, rank-00003\.safetensors of \1\."
        assert set(found) == {found[0]} and re.search(said, found[0])


def test_a_profiler_sees_all_ranks_by_one_clock(ranks):
    found = job(ranks, "profiled")
    assert all(one == found[0] for one in found)
    assert found[0][0] == [[step, rank] for step in (0, 1) for rank in range(len(found))]


def test_a_rank_needs_its_own_programs_only(ranks):
    job(ranks, "own_pair")


def test_a_program_for_another_number_of_ranks_is_refused(ranks):
    n = len(ranks.channels)
    with pytest.raises(RuntimeError, match=f"transpiled for {n + 1} ranks, {n} places were given; .*fluidx run -n {n + 1} --backend mpi"):
        job(ranks, "other_ranks")


def started(n, *args, where=()):
    """What mpirun gives for the script: its status and what it printed."""
    prefix, hosts, environ = where or ((), None, dict(os.environ))
    environ |= {"FLUIDX_TIMEOUT": "1.5", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words, environ = mpirun.command(n, [sys.executable, SCRIPT, *args], hosts, environ)
    done = subprocess.run([*prefix, *words], env=environ, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def lines(n):
    """What the ranks print: x's columns sum to -2, -1, 0 and 1, so w loses those in each of three steps; the loss is after two."""
    columns = (np.arange(24).reshape(6, 4) % 5 - 2.0).sum(0)
    w = [np.ones((4, 2)) - k * columns[:, None] for k in range(4)]
    return sorted(f"rank {r} of {n} has {(columns @ w[2]).sum()} and {w[3].sum()}" for r in range(n))


def test_a_script_on_two_hosts_needs_no_places(tmp_path):
    with two_hosts(tmp_path, 2) as where:
        status, said = started(4, "", "none", where=where)
    assert status == 0 and sorted(line for line in said.splitlines() if line.startswith("rank")) == lines(4), said
    assert "fluidx: 4 ranks, launched by Open MPI, over MPI" in said


@pytest.mark.parametrize(
    "what, message",
    [
        ("raise", "fluidx: rank 1 of 2, on host .*, failed\n(.*\n)*ValueError: no more data"),
        ("leave", "RankError: rank 0 waited 1.5 s in .*; rank 1 did not arrive\n  in step 2"),
        ("kill", "process rank 1 (.|\n)*signal 9"),
    ],
)
def test_what_ends_a_rank_ends_all(what, message):
    status, said = started(2, what, "places")
    assert status != 0 and re.search(message, said) and not re.search("^rank . of", said, re.M), said


def test_fluidx_run_shows_what_ranks_on_two_hosts_print_and_logs_what_they_fetch(tmp_path):
    log = tmp_path / "log"
    with two_hosts(tmp_path, 1) as (prefix, hosts, environ):
        options = ["-n", "2", "--backend", "mpi", "--hosts", hosts, "--metrics", str(log)]
        words = [sys.executable, "-m", "fluidx.cli", "run", *options, SCRIPT, "", "none"]
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([*prefix, *words], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == lines(2), done.stderr
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2]


def test_fluidx_run_goes_on_with_the_host_that_is_left(tmp_path):
    """Of two hosts with a rank each one loses its rank, which is killed in step 2: the script starts again on the other one."""
    log, script = tmp_path / "log", Path(__file__).parents[1] / "launch_script.py"
    with two_hosts(tmp_path, 1) as (prefix, hosts, environ):
        options = ["-n", "2", "--backend", "mpi", "--hosts", hosts, "--restarts", "1", "--elastic", "--metrics", str(log)]
        words = [sys.executable, "-m", "fluidx.cli", "run", *options, str(script), "data_parallel", str(tmp_path), "kill"]
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([*prefix, *words], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "rank 0 is done\n"), done.stderr
    told, again = done.stderr.split("fluidx run: ")[1:]
    assert again.startswith("restarting on 1 of 2 ranks (restart 1 of 1); ")
    killed = r"rank 1: its process was killed by signal 9 \(SIGKILL\)\n  after step 1\n  on host host-1, process \d+\n"
    last = r"    rank {}: all_reduce \(sum\) of float32\[4, 2\] among ranks 0, 1"
    lines = killed + "  the last collective that each rank completed:\n" + last.format(0) + ".*\n" + last.format(1) + "\n"
    assert re.fullmatch(lines, told) or re.fullmatch(lines.replace(last.format(0), "    rank 0: not known"), told), told
    *before, first, second, third = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert [first, second, third] == [0, 1, 2] and before in ([0], [0, 1])  # mpirun ends rank 0, perhaps before it has told of step 1


def test_ranks_end_with_an_mpirun_that_is_killed(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, time\nfrom fluidx.comm.launched_rank import member\nmember()\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    words, environ = mpirun.command(2, [sys.executable, str(script)], None, environ)
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
    deadline = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < deadline


def runs(pid):
    """Is it a process that has not ended, though nobody may have asked yet how it did?"""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_script_that_nobody_launched_makes_no_file_for_messages():
    """Singletons of Open MPI 5.0.11 leave theirs in /dev/shm, also when they end well."""
    code = """if True:
        import os, fluidx as fx
        before = dict(os.environ)
        assert len(fx.mpi_places()) == 1 and dict(os.environ) == before
        assert "/dev/shm/sm_segment" not in open("/proc/self/maps").read()
    """
    subprocess.run([sys.executable, "-c", code], env={k: v for k, v in os.environ.items() if not k.startswith("OMPI_")}, check=True)
