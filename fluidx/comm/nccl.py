"""Ranks as GPUs: the Communicator protocol over `cupy.cuda.nccl`, one rank thread and one communication stream per GPU.

NOT YET RUN ON A GPU. The calls follow CuPy 14.2's binding; the tests that would run it are marked `gpu`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .base import CommAborted, CommError, CommTimeout, Ranks

_IN_PROGRESS = 7  # ncclInProgress: not an error
_POLL = 0.0005  # seconds between looks at a stream that has not finished


def _nccl() -> Any:
    try:
        import cupy.cuda.nccl as nccl
    except ImportError:
        raise CommError("NCCL needs CuPy, which is not installed; pip install 'fluidx[cuda13]' (or [cuda12])") from None
    if not nccl.available:
        raise CommError("CuPy finds no libnccl; pip install nvidia-nccl-cu13 (or -cu12) beside CuPy")
    return nccl


def nccl_dtype(nccl: Any, dtype: np.dtype) -> int:
    """NCCL's number for a dtype. bool travels as uint8; NCCL has no 16-bit integers."""
    names = {
        "int8": "INT8", "uint8": "UINT8", "bool": "UINT8", "int32": "INT32", "uint32": "UINT32", "int64": "INT64",
        "uint64": "UINT64", "float16": "FLOAT16", "float32": "FLOAT32", "float64": "FLOAT64", "bfloat16": "BFLOAT16",
    }  # fmt: skip
    if dtype.name not in names:
        raise CommError(f"NCCL cannot send {dtype.name}; cast it first")
    return getattr(nccl, f"NCCL_{names[dtype.name]}")


class NcclWorld:
    """What the rank threads of one executor share: one NCCL id per group, and the first failure."""

    def __init__(self, devices: Sequence[int], timeout: float = 60.0):
        self.nccl = _nccl()
        self.devices = list(devices)
        self.world_size = len(self.devices)
        self.timeout = timeout
        self._guard = threading.Lock()
        self._ids: dict[Ranks, bytes] = {}
        self._ranks: dict[int, NcclCommunicator] = {}
        self.failure: BaseException | None = None

    def communicator(self, rank: int) -> NcclCommunicator:
        if rank not in self._ranks:
            self._ranks[rank] = NcclCommunicator(self, rank)
        return self._ranks[rank]

    def unique_id(self, ranks: Ranks) -> bytes:
        with self._guard:
            if ranks not in self._ids:
                self._ids[ranks] = self.nccl.get_unique_id()
            return self._ids[ranks]

    def reset(self) -> None:
        self.failure = None

    def abort(self, reason: BaseException) -> None:
        """Abort every communicator. ncclCommAbort can hang, so each runs in a daemon thread with a deadline."""
        with self._guard:
            if self.failure is not None:
                return
            self.failure = reason
        helpers = [threading.Thread(target=c.abort_all, daemon=True) for c in self._ranks.values()]
        for h in helpers:
            h.start()
        for h in helpers:
            h.join(5.0)
        self._ids.clear()

    def close(self) -> None:
        for c in self._ranks.values():
            c.abort_all()


class NcclCommunicator:
    """One rank's communicator; implements comm.base.Communicator on CuPy arrays.

    Work goes to the communication stream, which waits for the compute stream by an event. The compute stream goes on meanwhile: the plan
    says where it must wait (executor/streams.py).
    """

    asynchronous = True

    def __init__(self, world: NcclWorld, rank: int):
        import cupy

        self.world, self.rank, self.world_size = world, rank, world.world_size
        self.cupy, self.nccl = cupy, world.nccl
        self._comms: dict[Ranks, Any] = {}
        with cupy.cuda.Device(world.devices[rank]):
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def _comm(self, ranks: Ranks) -> Any:
        comm = self._comms.get(ranks)
        if comm is None:
            uid = self.world.unique_id(ranks)
            comm = self._call("init", lambda: self.nccl.NcclCommunicator(len(ranks), uid, ranks.index(self.rank)))
            self._comms[ranks] = comm
        return comm

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KeyError as e:  # CuPy's NcclError does not know statuses 7 and 8 and raises KeyError instead
            error = CommError(f"rank {self.rank}: NCCL {what} failed with status {e}")
            error.status = e.args[0] if e.args else None
            raise error from None
        except self.nccl.NcclError as e:
            raise CommError(f"rank {self.rank}: NCCL {what} failed: {e}") from None

    def _launch(self, what: str, ranks: Ranks, call: Callable[[Any, int], None]) -> None:
        if self.world.failure is not None:
            raise CommAborted(f"stopped because another rank failed: {self.world.failure}")
        compute = self.cupy.cuda.get_current_stream()
        comm = self._comm(ranks)
        self.stream.wait_event(compute.record())
        self._call(what, lambda: call(comm, self.stream.ptr))

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls inside start together. A group that was opened is closed, or this thread's next call would join it."""
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def mark(self) -> Any:
        """An event behind the communication that was started so far."""
        return self.stream.record()

    def order_after(self, event: Any) -> None:
        """The compute stream goes on only when `event` is reached."""
        self.cupy.cuda.get_current_stream().wait_event(event)

    def wait(self) -> None:
        """Wait for the communication stream with a deadline, looking for NCCL's asynchronous errors meanwhile."""
        deadline = time.monotonic() + self.world.timeout
        while not self.stream.done:
            if self.world.failure is not None:
                raise CommAborted(f"stopped because another rank failed: {self.world.failure}")
            for ranks, comm in list(self._comms.items()):
                try:
                    self._call(f"over ranks {ranks}", comm.check_async_error)
                except CommError as e:
                    if e.status != _IN_PROGRESS:
                        raise
            if time.monotonic() > deadline:
                raise CommTimeout(f"rank {self.rank} waited {self.world.timeout:g} s for NCCL", rank=None)
            time.sleep(_POLL)

    def abort_all(self) -> None:
        comms, self._comms = list(self._comms.values()), {}
        for c in comms:
            c.abort()

    # -- the protocol -------------------------------------------------------------------------------------------------------

    def init_group(self, ranks: Ranks) -> None:
        self._comm(ranks)

    def barrier(self, ranks: Ranks) -> None:
        token = self.cupy.zeros(1, "float32")
        self.all_reduce(token, token, "sum", ranks)
        self.wait()

    def _op(self, op: str) -> int:
        return getattr(self.nccl, f"NCCL_{op.upper()}")

    def broadcast(self, x: Any, out: Any, root: int, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("broadcast", ranks, lambda c, s: c.broadcast(x.data.ptr, out.data.ptr, x.size, t, root, s))

    def all_reduce(self, x: Any, out: Any, op: str, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("all_reduce", ranks, lambda c, s: c.allReduce(x.data.ptr, out.data.ptr, x.size, t, self._op(op), s))

    def reduce(self, x: Any, out: Any, op: str, root: int, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("reduce", ranks, lambda c, s: c.reduce(x.data.ptr, out.data.ptr, x.size, t, self._op(op), root, s))

    def all_gather(self, x: Any, out: Any, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("all_gather", ranks, lambda c, s: c.allGather(x.data.ptr, out.data.ptr, x.size, t, s))

    def reduce_scatter(self, x: Any, out: Any, op: str, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("reduce_scatter", ranks, lambda c, s: c.reduceScatter(x.data.ptr, out.data.ptr, out.size, t, self._op(op), s))

    def all_to_all(self, x: Any, out: Any, ranks: Ranks) -> None:
        n = len(ranks)
        xs, outs = x.reshape(n, -1), out.reshape(n, -1)
        t = nccl_dtype(self.nccl, x.dtype)

        def call(c: Any, s: int) -> None:
            with self._group():
                for j in range(n):
                    c.send(xs[j].data.ptr, xs[j].size, t, j, s)
                    c.recv(outs[j].data.ptr, outs[j].size, t, j, s)

        self._launch("all_to_all", ranks, call)

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        everyone = tuple(range(self.world_size))

        def call(c: Any, s: int) -> None:
            with self._group():
                for x, peer in sends:
                    c.send(x.data.ptr, x.size, nccl_dtype(self.nccl, x.dtype), peer, s)
                for out, peer in recvs:
                    c.recv(out.data.ptr, out.size, nccl_dtype(self.nccl, out.dtype), peer, s)

        self._launch("send/recv", everyone, call)

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)
