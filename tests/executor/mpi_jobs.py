"""What each rank does in test_mpi.py: functions of plain data, which a process is told by name."""

import os
import socket
from functools import partial

import numpy as np

import fluidx as fx
from fluidx.executor.run import observers
from fluidx.testing.models import classifier
from tests.executor import bodies, profiled_script


def beside(places, overlap):
    """Answers that are rounded, of many small buckets, which are reduced on a thread of their own where that is asked for."""
    os.environ["FLUIDX_OVERLAP"] = overlap
    try:
        strategy = partial(fx.strategies.data_parallel, bucket_mb=1 / 1024, first_bucket_mb=1 / 4096)
        return bodies.of_ranks(bodies.Case("mlp classifier", strategy, len(places)), places)
    finally:
        del os.environ["FLUIDX_OVERLAP"]


def beside_over_mpi(comm, overlap):
    return beside(fx.mpi_places(), overlap)


def state_goes_in_and_out(comm):
    model = classifier()
    t = fx.DistributeTranspiler("zero3")
    t.transpile(program=model.main, startup_program=model.startup, trainers=comm.world_size)
    with fx.ParallelExecutor(t, places=fx.mpi_places(), verify=False) as exe:
        exe.run_startup()
        name = model.gradients[0][0]
        value = np.arange(exe.state(name).size, dtype="float32").reshape(exe.state(name).shape)
        exe.set_state(name, value)
        assert np.array_equal(exe.state(name), value)
        parts = exe.run(feed=model.feed(8), fetch_list=[model.loss], return_merged=False)[0]
        return [None if p is None else p.tolist() for p in parts]


def checkpoints(comm, folder):
    """Two steps that are done again, from what was saved while they were done first; and what a folder of one host alone is told."""
    model = classifier()
    t = fx.DistributeTranspiler("zero3")
    t.transpile(program=model.main, startup_program=model.startup, trainers=comm.world_size)
    with fx.ParallelExecutor(t, places=fx.mpi_places(), verify=False) as exe, fx.io.CheckpointManager(folder, asynchronous=True) as kept:
        exe.run_startup()

        def steps():
            return [exe.run(feed=model.feed(8, k), fetch_list=[model.loss])[0].tolist() for k in range(2)]

        steps()
        kept.save(2, model.main, exe, extra={"next": 2})
        first = steps()
        assert kept.restore(model.main, exe) == {"next": 2} and steps() == first
        here = os.getcwd()
        os.makedirs(f"{folder}/{comm.rank}")
        os.chdir(f"{folder}/{comm.rank}" if comm.rank > 1 else folder)
        try:
            fx.io.save(model.main, "run", exe, sharded=True)
        except fx.io.CheckpointError as e:
            return str(e)
        finally:
            os.chdir(here)


def profiled(comm):
    """What this rank sees of two runs of all. The clocks of another host, where there is one, are quarters of an hour before."""
    model, t = profiled_script.built(comm.world_size)
    late = 10**12 if socket.gethostname() == "host-1" else 0
    before, observers.clock = observers.clock, lambda: before() + late
    try:
        with fx.ParallelExecutor(t, places=fx.mpi_places(), verify=False) as exe, fx.profiler.profiler() as profile:
            exe.run_startup()
            profiled_script.train(exe, model)
    finally:
        observers.clock = before
    profiled_script.check_clocks(profile, within=1.0)
    return profiled_script.runs(profile), profiled_script.facts(profile)


def own_pair(comm):
    """Each rank has only its own programs."""
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=comm.world_size)
    own = fx.ProgramPair(t.get_trainer_program(comm.rank), t.get_startup_program(comm.rank))
    found = []
    for programs in (own, t):
        with fx.ParallelExecutor(programs, places=fx.mpi_places(), verify=False) as exe:
            exe.run_startup()
            found.append(exe.run(feed=model.feed(7), fetch_list=[model.loss])[0].tolist())
    assert found[0] == found[1]


def other_ranks(comm):
    """A program for another number of ranks."""
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=comm.world_size + 1)
    fx.ParallelExecutor(t, places=fx.mpi_places())
