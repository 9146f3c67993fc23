"""GPUs that are played, in processes that are ranks: CuPy on NumPy, NCCL over what they meet by on the host. And what ranks do there."""

import os
import sys
import threading

import numpy as np

import fluidx as fx
from fluidx.comm.launch_environment import Launched
from fluidx.comm.launched_rank import LaunchedRank, enter, member
from fluidx.executor.ranks import launched_group
from fluidx.testing.models import integer_mlp
from tests.comm import fake_nccl
from tests.executor import bodies, faulty
from tests.executor.fake_cupy import FakeCupy


def install(host):
    """Let `import cupy` find them. `host()` is the communicator among all ranks of this process."""
    modules, _ = fake_nccl.modules(fake_nccl.Processes(host))
    cupy = FakeCupy()
    cupy.cuda = modules["cupy.cuda"]
    sys.modules.update(modules, cupy=cupy)


def be_launched(comm):
    """Be a rank of a script, of those that are in the world of `comm`."""
    install(lambda: comm)
    enter(LaunchedRank(Launched("a test", comm.rank, comm.world_size, comm.world_size, "job"), comm.world))


def train(comm, names):
    """What this rank is given of the cases with these names."""
    return [bodies.of_ranks(bodies.cases(comm.world_size)[name], fx.cuda_places()) for name in names]


def hold(comm):
    """Where a script that names no places computes, what its variables are there, and what all ranks see of one."""
    model = integer_mlp()
    t = fx.DistributeTranspiler("zero3")
    t.transpile(program=model.main, startup_program=model.startup, trainers=comm.world_size)
    os.environ["FLUIDX_DEVICE"] = "cuda"
    with fx.ParallelExecutor(t, verify=False) as exe:
        exe.run_startup()
        name = model.gradients[0][0]
        exe.set_state(name, np.arange(30, dtype="float32").reshape(6, 5))
        kinds = {type(a).__name__ for a in exe.scopes[comm.rank].arrays.values()}
        return str(exe.places[comm.rank]), [*kinds], exe.state(name).tolist()


def wait_to_be_stopped():
    while True:
        member().world.check()


faulty.HOW["late"] = wait_to_be_stopped


def fail(comm, how):
    """What the ranks are told when one of them fails on its GPU in step 1, where no other waits for it."""
    v = fx.layers.create_global_var([2], 1.0, "float32", persistable=True)
    fx.layers.assign(fx.ir.Builder(fx.default_main_program().global_block()).t_faulty(v, how=how, rank=1, step=1), v)
    t = fx.DistributeTranspiler().transpile(trainers=comm.world_size)
    exe = fx.ParallelExecutor(t, places=fx.cuda_places())
    exe.run_startup()
    try:
        for _ in range(2):
            exe.run()
    except fx.RankError as e:
        return e.rank, str(e)


def several(comm, names):
    """What a process of two sees of these cases, if each of the two holds two ranks, which have a GPU each."""
    worlds, real = [], launched_group.world_of
    launched_group.world_of = lambda *args: worlds.append(real(*args)) or worlds[-1]
    # NCCL connects on a thread of its own, whose name ends with the rank
    install(lambda: worlds[-1].communicator(int(threading.current_thread().name.rpartition("-")[2])))
    places = [fx.CUDAPlace(2 * comm.rank), fx.CUDAPlace(2 * comm.rank + 1)]
    return [bodies.of_ranks(bodies.cases(4)[name], places) for name in names]
