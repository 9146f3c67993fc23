"""A launched rank prints the program for all ranks once and makes no programs but its own; edited rank programs are compared one by one."""

from types import SimpleNamespace

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.ranks import group_choice, launched_group
from fluidx.ir import program as ir_program
from fluidx.launch import process_job
from fluidx.native import shared
from fluidx.transpiler.specialize import Specializer

STRATEGIES = ["data_parallel", "data_parallel ring", "zero1", "zero3", "reduce_broadcast"]
needs_processes = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


class PlayedRank:
    """A rank among others that say what it says."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.memory = rank, world_size, None
        self.launched = SimpleNamespace(by="a test")
        self.comm = SimpleNamespace(asynchronous=False)
        self.world = SimpleNamespace(timeout=1.0, shared=None)
        self.meet = None

    def gather(self, said):
        return [said] * self.world_size

    def gather_numbers(self, numbers):
        return [np.array(numbers)] * self.world_size

    def allocate(self, nbytes):
        return np.zeros(nbytes, np.uint8)


@pytest.fixture
def counts(monkeypatch):
    """How many programs were printed, and for which ranks programs were made."""
    found = SimpleNamespace(printed=0, ranks=set())
    show, make = ir_program.show_program, Specializer.rank_program

    def shown(*args, **how):
        found.printed += 1
        return show(*args, **how)

    def made(self, rank):
        found.ranks.add(rank)
        return make(self, rank)

    monkeypatch.setattr(ir_program, "show_program", shown)
    monkeypatch.setattr(Specializer, "rank_program", made)
    return found


def strategy_of(said):
    name, *algorithm = said.split()
    return getattr(fx.strategies, name)(**({"algorithm": algorithm[0]} if algorithm else {}))


def net():
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 64], "float32")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.layers.fc(x, 64), 1)))
    return main, startup


def started(t, rank, world_size, monkeypatch, **how):
    monkeypatch.setattr(launched_group, "keep_to", lambda cores: None)
    monkeypatch.setattr(launched_group.allocation, "new_bytes", launched_group.allocation.new_bytes)
    monkeypatch.setattr(group_choice, "member", lambda: PlayedRank(rank, world_size))
    return fx.ParallelExecutor(t, **how)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_prints_one_pair_and_makes_its_own_programs(strategy, ranks, verify, counts, monkeypatch):
    main, startup = net()
    t = fx.DistributeTranspiler(strategy_of(strategy)).transpile(program=main, startup_program=startup, trainers=ranks)
    started(t, ranks - 1, ranks, monkeypatch, verify=verify)
    assert (counts.printed, counts.ranks) == (1, {ranks - 1})


def test_programs_beside_servers_are_all_made_and_one_pair_is_printed(counts, monkeypatch):
    """A server's program does not follow from the program for all ranks alone."""
    main, startup = net()
    t = fx.DistributeTranspiler("parameter_server").transpile(program=main, startup_program=startup, trainers=2)
    started(t, 0, t.world_size, monkeypatch)
    assert counts.ranks == set(range(t.world_size)) and counts.printed == 1


@pytest.mark.parametrize("edited", [0, 1])
@pytest.mark.parametrize("strategy", ["data_parallel", "parameter_server"])
def test_an_edited_rank_program_is_compared_with_those_of_others(strategy, edited, counts, monkeypatch):
    """Whether it is the rank's own or one of another rank that it looked at."""
    main, startup = net()
    trainers = 3 if strategy == "parameter_server" else 4
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=trainers)
    p = t.get_trainer_program(edited)
    p.global_block().oplist = p.global_block().oplist[:-1]
    started(t, 1, 4, monkeypatch, verify=False)
    assert counts.ranks == {0, 1, 2, 3} and counts.printed == 5  # each pair, and the one that their origin is a fingerprint of


SCRIPT = """
import sys
import numpy as np
import fluidx as fx

main, startup = fx.default_main_program(), fx.default_startup_program()
x = fx.data("x", [-1, 4], "float32")
with fx.name_scope("first"):
    h = fx.layers.fc(x, 4)
y = fx.layers.fc(h, 2)
loss = fx.layers.mean(y)
fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
name, *algorithm = sys.argv[1].split()
strategy = getattr(fx.strategies, name)(**({"algorithm": algorithm[0]} if algorithm else {}))
t = fx.DistributeTranspiler(strategy).transpile(trainers=fx.world_size())
what, edited = sys.argv[2], int(sys.argv[3])
if what == "edit" and fx.rank() == 1:
    p = t.get_trainer_program(edited)
    p.global_block().oplist = p.global_block().oplist[:-1]
if what == "seed" and fx.rank() == 1:
    main.random_seed = 12345
    t.transpile(trainers=fx.world_size())
with fx.ParallelExecutor(t, verify=what == "run") as exe:
    exe.run_startup()
    feed = {"x": np.arange(24, dtype="float32").reshape(6, 4)}
    for merged in (True, False):
        found = exe.run(feed=feed, fetch_list=[loss, y], return_merged=merged)
    w = main.all_parameters()[0].name
    exe.set_state(w, exe.state(w) + 1)
    assert found[0][fx.rank()] is not None and exe.layout() and exe.step == 2
assert [*t._ranks] == [fx.rank()], [*t._ranks]
"""


def launched(tmp_path, *args, ranks=3):
    (file := tmp_path / "script.py").write_text(SCRIPT)
    said = []
    return process_job.run(str(file), [str(a) for a in args], ranks, say=said.append, timeout=20.0), "\n".join(said)


@needs_processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_makes_the_programs_of_no_other_rank(tmp_path, strategy):
    assert launched(tmp_path, strategy, "run", 0) == (0, "")


@needs_processes
@pytest.mark.parametrize("edited", [0, 1, 2])
def test_a_program_that_one_rank_edited_is_named(tmp_path, edited):
    status, said = launched(tmp_path, "data_parallel", "edit", edited)
    assert status == 1 and f"the ranks do not run the same program: the first difference in rank {edited}'s is" in said
    assert "rank 1: (nothing)" in said and "every rank of a launched script must build the same program" in said


@needs_processes
def test_another_source_on_one_rank_is_named(tmp_path):
    status, said = launched(tmp_path, "data_parallel", "seed", 0)
    assert status == 1 and "the first difference in rank 0's is" in said and "ranks 0, 2: " in said
