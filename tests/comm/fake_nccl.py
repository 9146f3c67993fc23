"""NCCL and the CuPy around it on the host: arrays have addresses, and the calls are done by rank threads over `ThreadWorld`, or by
processes over the communicator by which they meet on the host.

Calls between groupStart and groupEnd are done when the group closes. Scratch must be made and filled on a communication stream.
"""

import ctypes
import itertools
import socket
import threading
import types
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from fluidx.comm import ThreadWorld
from fluidx.comm.process_spawner import Channel

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
OPS = ("sum", "prod", "max", "min", "avg")
GPUS = 8  # that a host has


class Array(np.ndarray):
    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def at(address, count, number):
    """The `count` elements of dtype number `number` at an address."""
    dtype = np.dtype(ml_dtypes.bfloat16 if DTYPES[number] == "bfloat16" else DTYPES[number])
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class _State(threading.local):
    """What a rank thread is in: its current stream, and the group of calls that it has open."""

    stream = None
    group = None


class Stream:
    def __init__(self, state, name):
        self.state, self.name, self.ptr, self.done = state, name, 0, True

    def record(self):
        return None

    def wait_event(self, event):
        pass

    def __enter__(self):
        self.before, self.state.stream = self.state.stream, self

    def __exit__(self, *exc):
        self.state.stream = self.before


class Threads:
    """How ranks that are threads find each other, by an id: the members of a group have a world of their own."""

    def __init__(self):
        self.worlds, self.guard, self.ids = {}, threading.Lock(), itertools.count()

    def unique_id(self):
        return next(self.ids).to_bytes(128)

    def connect(self, n, uid, rank):
        """A communicator, and the ranks of the group in it."""
        with self.guard:
            world = self.worlds.setdefault(uid, ThreadWorld(n, timeout=5.0))
        return world.communicator(rank), tuple(range(n))


class Processes:
    """How processes do: the id is the address of a socket at which the members say who they are, as NCCL's own is. `host()` gives the
    communicator of this process."""

    def __init__(self, host):
        self.host = host

    def unique_id(self):
        door = socket.socket(socket.AF_UNIX)
        door.bind("")  # a name that nobody else has
        door.listen()
        threading.Thread(target=introduce, args=(door,), daemon=True).start()
        return door.getsockname().ljust(128)

    def connect(self, n, uid, rank):
        host = self.host()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(uid.rstrip())
            channel = Channel(sock)
            channel.send([n, rank, host.rank])
            return host, tuple(channel.receive()[0])


def introduce(door):
    """Tell the members of a group who they are, when all have come."""
    n, came = 1, {}
    while len(came) < n:
        channel = Channel(door.accept()[0])
        (n, rank, number), _ = channel.receive()
        came[rank] = number, channel
    for _, channel in came.values():
        channel.send([came[rank][0] for rank in range(n)])
    door.close()


class NcclError(RuntimeError):
    pass


def modules(ways=None):
    """{name: module} for sys.modules, and the list in which every NCCL call is noted as (name, rank)."""
    state, calls = _State(), []
    ways = ways or Threads()

    class Communicator:
        def __init__(self, n, uid, rank):
            (self.comm, self.everyone), self.rank = ways.connect(n, uid, rank), rank

        def _do(self, name, job, kind=None):
            calls.append((name, self.rank))
            if state.group is None:
                assert kind is None, "NCCL would wait for a peer that waits too: sends and receives belong into a group"
                job()
            else:
                state.group.append((self, kind, job))

        def broadcast(self, x, out, count, t, root, stream):
            self._do("broadcast", lambda: self.comm.broadcast(at(x, count, t), at(out, count, t), root, self.everyone))

        def allReduce(self, x, out, count, t, op, stream):
            self._do("allReduce", lambda: self.comm.all_reduce(at(x, count, t), at(out, count, t), OPS[op], self.everyone))

        def reduce(self, x, out, count, t, op, root, stream):
            self._do("reduce", lambda: self.comm.reduce(at(x, count, t), at(out, count, t), OPS[op], root, self.everyone))

        def allGather(self, x, out, count, t, stream):
            n = len(self.everyone)
            self._do("allGather", lambda: self.comm.all_gather(at(x, count, t), [*at(out, n * count, t).reshape(n, -1)], self.everyone))

        def reduceScatter(self, x, out, count, t, op, stream):
            n = len(self.everyone)
            parts = [*at(x, n * count, t).reshape(n, -1)]
            self._do("reduceScatter", lambda: self.comm.reduce_scatter(parts, at(out, count, t), OPS[op], self.everyone))

        def send(self, x, count, t, peer, stream):
            self._do("send", (at(x, count, t), self.everyone[peer]), "send")

        def recv(self, out, count, t, peer, stream):
            self._do("recv", (at(out, count, t), self.everyone[peer]), "recv")

        def check_async_error(self):
            pass

        def abort(self):
            calls.append(("abort", self.rank))

        def destroy(self):
            calls.append(("destroy", self.rank))

    def group_start():
        assert state.group is None
        state.group = []

    def group_end():
        queue, state.group = state.group, None
        for _, kind, job in queue:
            if kind is None:
                job()
        if any(kind for _, kind, _ in queue):
            comm = queue[0][0].comm
            comm.exchange([job for _, kind, job in queue if kind == "send"], [job for _, kind, job in queue if kind == "recv"])

    def scratch(array):
        assert state.stream is not None and state.stream.name == "comm", "scratch is made on the compute stream"
        return array.view(Array)

    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NcclError, nccl.NcclCommunicator = True, NcclError, Communicator
    nccl.get_unique_id, nccl.get_version = ways.unique_id, lambda: 22809
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    for table in (DTYPES, OPS):
        for number, name in enumerate(table):
            setattr(nccl, f"NCCL_{name.upper()}", number)

    class Device:
        def __init__(self, number):
            pass

        def use(self):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    compute = Stream(state, "compute")
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.Device = nccl, Device
    cuda.Stream = lambda non_blocking: Stream(state, "comm")
    cuda.get_current_stream = lambda: state.stream or compute
    cuda.is_available, cuda.runtime = (lambda: True), SimpleNamespace(getDeviceCount=lambda: GPUS)
    cuda.runtime.deviceGetPCIBusId = lambda number: f"0000:{number:02x}:00.0"
    cuda.runtime.getDeviceProperties = lambda number: {"name": b"played"}
    cupy = types.ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.cuda = cuda
    cupy.empty = lambda shape, dtype: scratch(np.full(shape, 77, dtype))
    cupy.ascontiguousarray = lambda x: scratch(np.array(x, order="C"))
    cupy.zeros = lambda n, dtype: np.zeros(n, dtype).view(Array)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}, calls
