"""all_reduce between ranks of one host: threads, processes, MPI where mpi4py is installed, gloo where PyTorch is, and what memory allows.

float32 in place, several a call, by blocks of C calls. "MPI" and "gloo" are what those libraries call all_reduce, between processes;
"messages" is what fluidx makes of MPI's messages between two ranks, as where ranks are on a host each: in rank order and with a deadline.
In "two hosts" (of an even number of ranks from 4 on) each half shares memory and sends the other messages, which stay on this host too.
"bound" is the time in which as many processes copy an array of that size each, all at once: an all_reduce among two reads and writes as
much, and in place it spares what a copy reads to write. A rank's figure is the mean of its calls in a round, a round's that of its slowest
rank.

    --ranks 2   --sizes 4096,...   --rounds 10   --save
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
from _common import Log, option, ratio, show

from fluidx import native
from fluidx.comm.mpi import mpirun
from fluidx.comm.mpi.world import why_not
from fluidx.native import shared
from fluidx.testing import each_rank
from fluidx.testing.mpi import MpiProcesses
from fluidx.testing.processes import ProcessRanks

SIZES = "4096,65536,1048576,26214400,104857600"
_SPEED = 2e9  # bytes a second, about, to choose how many calls a figure takes


def calls(nbytes: int) -> int:
    return max(2, min(2000, int(0.05 * _SPEED / nbytes)))


def all_reduce(comm: Any, nbytes: int) -> float:
    """Seconds of one."""
    ranks, count = tuple(range(comm.world_size)), calls(nbytes)
    shares = isinstance(getattr(comm.world, "shared", None), shared.SharedWorld)
    x = shared.take(nbytes).view(np.float32) if shares else np.zeros(nbytes // 4, np.float32)
    if comm.calls is not None and (made := comm.calls.all_reduce(x, x, "sum", ranks)) is not None:
        return _timed(comm, ranks, native.compile(made * count), count)

    def block() -> None:
        for _ in range(count):
            comm.all_reduce(x, x, "sum", ranks)

    return _timed(comm, ranks, block, count)


def copy(comm: Any, nbytes: int) -> float:
    """Seconds of a copy, while all ranks copy."""
    ranks, count = tuple(range(comm.world_size)), calls(nbytes)
    x, y = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)

    def block() -> None:
        for _ in range(count):
            np.copyto(y, x)

    return _timed(comm, ranks, block, count)


def _timed(comm: Any, ranks: tuple[int, ...], block: Any, count: int) -> float:
    block()
    comm.barrier(ranks)
    start = time.perf_counter()
    block()
    return (time.perf_counter() - start) / count


_MPI = """
import sys, time
import numpy as np
from mpi4py import MPI
comm, (nbytes, count) = MPI.COMM_WORLD, map(int, sys.argv[1:])
x = np.zeros(nbytes // 4, "float32")
for k in range(2):
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        comm.Allreduce(MPI.IN_PLACE, x)
    mean = (time.perf_counter() - start) / count
mean = comm.reduce(mean, MPI.MAX)
if comm.rank == 0:
    print(mean)
"""


_GLOO = """
import os, sys, time
import torch
import torch.distributed as dist
(rank, ranks, nbytes, count), store = map(int, sys.argv[1:5]), sys.argv[5]
torch.set_num_threads(1)
dist.init_process_group("gloo", "file://" + store, rank=rank, world_size=ranks)
x = torch.zeros(nbytes // 4)
for k in range(2):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(x)
    mean = (time.perf_counter() - start) / count
print(mean, flush=True)
os._exit(0)  # its threads have nothing to say at the end
"""


def gloo(ranks: int, nbytes: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-W", "ignore", "-c", _GLOO]
        told = [str(ranks), str(nbytes), str(calls(nbytes)), f"{folder}/store"]
        environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        peers = [subprocess.Popen([*words, str(r), *told], stdout=subprocess.PIPE, env=environ) for r in range(ranks)]
        return max(float(p.communicate(timeout=300)[0]) for p in peers)


def mpi(ranks: int, nbytes: int) -> float:
    args, environ = mpirun.command(ranks, [sys.executable, "-c", _MPI, str(nbytes), str(calls(nbytes))])
    return float(subprocess.run(args, check=True, capture_output=True, text=True, env=environ).stdout)


def main() -> None:
    ranks, rounds = int(option("ranks", "2")), int(option("rounds", "10"))
    log = Log("collectives")
    processes = ProcessRanks(ranks, 60.0)
    ways = {
        "bound": lambda n: max(processes.each("collectives:copy", [n])),
        "processes": lambda n: max(processes.each("collectives:all_reduce", [n])),
        "threads": lambda n: max(each_rank(ranks, lambda comm: all_reduce(comm, n), 60.0)),
    }
    job = None if why_not() or mpirun.why_not() else MpiProcesses(ranks)
    if job is not None:
        messages = job.ranks(ranks, 60.0)
        ways["messages"] = lambda n: max(messages.each("collectives:all_reduce", [n]))
        if ranks > 2 and ranks % 2 == 0:
            halves = job.ranks(ranks, 60.0, share=True, hosts=2)
            ways["two hosts"] = lambda n: max(halves.each("collectives:all_reduce", [n]))
        ways["MPI"] = lambda n: mpi(ranks, n)
    if find_spec("torch") is not None:
        ways["gloo"] = lambda n: gloo(ranks, n)
    log(f"all_reduce of float32 among {ranks} ranks, in place; microseconds")
    for nbytes in map(int, option("sizes", SIZES).split(",")):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(way(nbytes))
        for name, seconds in found.items():
            log(f"{nbytes / 1024:10.0f} KB  {name:10} {show(seconds, 1e6, 'us')}; of the bound {ratio(seconds, found['bound'])}")
    processes.close()
    if job is not None:
        job.close()
    log.close()


if __name__ == "__main__":
    main()
