"""NcclCommunicator: the Communicator protocol for GPUs over `cupy.cuda.nccl`, with one communication stream for each GPU.

Ranks are threads of one process (NcclWorld), or processes that are also connected on the host (LaunchedNcclWorld). NCCL chooses its own
order of additions, and does not name the rank for which it waits.

NOT YET RUN ON A GPU. The calls follow CuPy 14.2's binding; the tests that would run it are marked `gpu`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..ir.errors import install
from .base import STOPPED, CommAborted, CommError, CommTimeout, Ranks
from .least_versions import nccl_version, too_old
from .nccl_parts import NcclParts, even
from .nccl_rings import RingOrder

_IN_PROGRESS = 7  # ncclInProgress: not an error
_POLL = 0.0005  # seconds between looks at a stream that has not finished
_LOOK = 0.05  # seconds between looks at whether another rank has failed
_GRACE = 5.0  # seconds for aborts, which can hang
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES


def library() -> Any:
    """CuPy's module for NCCL. Raises CommError, which says what to install, if it is missing or too old."""
    try:
        import cupy
        import cupy.cuda.nccl as nccl
    except ImportError:
        raise CommError(f"NCCL needs CuPy, which is not installed; {install('cuda13', 'cuda12')}") from None
    if not nccl.available:
        raise CommError("CuPy finds no libnccl; pip install nvidia-nccl-cu13 (or -cu12) beside CuPy")
    if reason := too_old("CuPy", cupy.__version__) or too_old("NCCL", nccl_version(nccl.get_version())):
        raise CommError(reason)
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
    """The state that the rank threads of one executor share: an NCCL id for each group, and the first failure."""

    shared = None
    threaded = True

    def __init__(self, devices: Sequence[int] | Mapping[int, int], timeout: float = 60.0, world_size: int | None = None):
        """`devices` are the GPUs of the ranks in this process: all ranks, unless `world_size` is given."""
        self.nccl = library()
        self.devices = dict(devices) if isinstance(devices, Mapping) else dict(enumerate(devices))
        self.world_size = len(self.devices) if world_size is None else world_size
        self.timeout = timeout
        self._guard = threading.Lock()
        self._ids: dict[tuple[Ranks, int], bytes] = {}
        self._ranks: dict[int, NcclCommunicator] = {}
        self.failure: BaseException | None = None

    def communicator(self, rank: int) -> NcclCommunicator:
        if rank not in self._ranks:
            self._ranks[rank] = NcclCommunicator(self, rank)
        return self._ranks[rank]

    def unique_id(self, ranks: Ranks, rank: int, ring: int = 0) -> bytes:
        """The NCCL id by which the members of a group connect on a ring. All members call it; this one is `rank`."""
        with self._guard:
            if (ranks, ring) not in self._ids:
                self._ids[ranks, ring] = self.nccl.get_unique_id()
            return self._ids[ranks, ring]

    def begin(self) -> None:
        """Nothing to do: communication is asynchronous, and no rank has a second thread."""

    def check(self) -> None:
        """Raise CommAborted when a rank has failed."""
        if self.failure is not None:
            raise CommAborted(f"{STOPPED}{self.failure}")

    def reset(self) -> None:
        self.failure = None

    def abort(self, reason: BaseException) -> None:
        """Abort every communicator."""
        with self._guard:
            if self.failure is not None:
                return
            self.failure = reason
        self.close()

    def close(self, how: str = "abort") -> None:
        """Release the communicators. NCCL can hang in it, so each call runs in a daemon thread with a deadline."""
        helpers = [threading.Thread(target=c.give_back, args=(how,), daemon=True) for c in self._ranks.values()]
        for h in helpers:
            h.start()
        for h in helpers:
            h.join(_GRACE)
        self._ids.clear()


class LaunchedNcclWorld(NcclWorld):
    """The world of a process that holds some of the ranks, by default one. `hosts` are their communicators of all ranks on the CPU side.

    Ranks use it to send NCCL ids, and to notice a failed rank. A thread checks for failures all the time, because a thread that waits for a
    GPU cannot.
    """

    def __init__(self, hosts: Sequence[Any], devices: Sequence[int]):
        self.hosts, self.host = {host.rank: host for host in hosts}, hosts[0]
        super().__init__(dict(zip(self.hosts, devices, strict=True)), self.host.world.timeout, self.host.world_size)
        self._closed = threading.Event()
        if self.host.world.threaded:
            threading.Thread(target=self._watch, name="fluidx-nccl", daemon=True).start()

    def unique_id(self, ranks: Ranks, rank: int, ring: int = 0) -> bytes:
        """The first member makes the id and broadcasts it; ranks outside of the group take no part."""
        uid = np.zeros(_ID_BYTES, np.uint8)
        if ranks[0] == rank:
            uid[:] = np.frombuffer(self.nccl.get_unique_id(), np.uint8)
        self.hosts[rank].broadcast(uid, uid, 0, ranks)
        return uid.tobytes()

    def check(self) -> None:
        self.host.world.check()

    def abort(self, reason: BaseException) -> None:
        """Abort this rank's communicators, and those of the other ranks."""
        self.host.abort(reason)
        super().abort(reason)

    def close(self, how: str = "destroy") -> None:
        """Destroy the communicators at the end of the script: this waits until the others have read all data. After a failure, abort
        them."""
        self._closed.set()
        try:
            self.check()
        except CommAborted:
            how = "abort"
        super().close(how)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK):
            try:
                self.check()
            except CommAborted as e:
                self.abort(e)


class NcclCommunicator:
    """One rank's communicator; implements comm.base.Communicator on CuPy arrays.

    Work goes to the communication stream of its ring, which waits for the compute stream by an event. The compute stream goes on meanwhile:
    the plan says where it must wait (executor/plan/overlap_rules.py).
    """

    asynchronous = True
    calls: Any = None

    def __init__(self, world: NcclWorld, rank: int, number: int = 0, rings: dict[int, NcclCommunicator] | None = None):
        """`number` is that of its ring. All `rings` of a rank share the order in which their calls run."""
        import cupy

        self.world, self.rank, self.world_size = world, rank, world.world_size
        self.cupy, self.nccl = cupy, world.nccl
        self._comms: dict[Ranks, Any] = {}
        self._device = world.devices[rank]
        with cupy.cuda.Device(self._device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self._parts = NcclParts(cupy, self.stream)
        self._number, self._rings = number, {} if rings is None else rings
        self._order: RingOrder = self._rings[0]._order if self._rings else RingOrder()
        self._rings[number] = self
        self._order.add(number, self.stream)

    def ring(self, number: int) -> NcclCommunicator:
        if number not in self._rings:
            NcclCommunicator(self.world, self.rank, number, self._rings)
        return self._rings[number]

    def _comm(self, ranks: Ranks) -> Any:
        comm = self._comms.get(ranks)
        if comm is None:
            uid = self._call("get_unique_id", lambda: self.world.unique_id(ranks, self.rank, self._number))
            comm = self._connected(ranks, lambda: self.nccl.NcclCommunicator(len(ranks), uid, ranks.index(self.rank)))
            self._comms[ranks] = comm
        return comm

    def _connected(self, ranks: Ranks, make: Callable[[], Any]) -> Any:
        """Call `make` on another thread, because NCCL waits in it for all members without a deadline. After a timeout the thread is given
        up."""
        made: Future[Any] = Future()

        def job() -> None:
            try:
                with self.cupy.cuda.Device(self._device):
                    made.set_result(make())
            except BaseException as e:
                made.set_exception(e)

        threading.Thread(target=job, name=f"fluidx-nccl-init-{self.rank}", daemon=True).start()
        deadline = time.monotonic() + self.world.timeout
        while time.monotonic() < deadline:
            self.world.check()
            with suppress(TimeoutError):
                return self._call("init", lambda: made.result(min(_LOOK, self.world.timeout)))
        raise CommTimeout(f"rank {self.rank} waited {self.world.timeout:g} s for NCCL to connect ranks {', '.join(map(str, ranks))}")

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KeyError as e:  # CuPy's NcclError does not know statuses 7 and 8 and raises KeyError instead
            self.world.check()
            error = CommError(f"rank {self.rank}: NCCL {what} failed with status {e}")
            error.status = e.args[0] if e.args else None
            raise error from None
        except self.nccl.NcclError as e:
            self.world.check()  # aborted calls fail too; report the abort instead
            raise CommError(f"rank {self.rank}: NCCL {what} failed: {e}") from None

    def _launch(self, what: str, ranks: Ranks, call: Callable[[Any, int], None], reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Start a call that reads and writes these arrays."""
        self.world.check()
        compute = self.cupy.cuda.get_current_stream()
        comm = self._comm(ranks)
        self.stream.wait_event(compute.record())
        self._order.before(self._number, reads, writes)
        self._call(what, lambda: call(comm, self.stream.ptr))
        self._order.after(self._number, reads, writes)

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Calls inside start together. A group that was opened is closed, or this thread's next call would join it."""
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def mark(self) -> Any:
        """Events after the communication that was started so far on all rings."""
        return self._order.mark()

    def order_after(self, token: Any) -> None:
        """The compute stream goes on only when the events of the token are reached."""
        for event in token[1]:
            self.cupy.cuda.get_current_stream().wait_event(event)
        self._order.reached(token)

    def wait(self) -> None:
        """Wait for the communication streams, with a deadline, and poll NCCL's asynchronous errors meanwhile."""
        deadline = time.monotonic() + self.world.timeout
        while not all(stream.done for stream in self._order.streams.values()):
            self.world.check()
            for ranks, comm in [item for one in list(self._rings.values()) for item in list(one._comms.items())]:
                try:
                    self._call(f"over ranks {ranks}", comm.check_async_error)
                except CommError as e:
                    if e.status != _IN_PROGRESS:
                        raise
            if time.monotonic() > deadline:
                raise CommTimeout(f"rank {self.rank} waited {self.world.timeout:g} s for NCCL", rank=None)
            time.sleep(_POLL)
        self.world.check()  # aborted work counts as done; report the abort instead

    def give_back(self, how: str) -> None:
        for one in list(self._rings.values()):
            comms, one._comms = list(one._comms.values()), {}
            for c in comms:
                getattr(c, how)()

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
        self._launch("broadcast", ranks, lambda c, s: c.broadcast(x.data.ptr, out.data.ptr, x.size, t, root, s), [x], [out])

    def all_reduce(self, x: Any, out: Any, op: str, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("all_reduce", ranks, lambda c, s: c.allReduce(x.data.ptr, out.data.ptr, x.size, t, self._op(op), s), [x], [out])

    def reduce(self, x: Any, out: Any, op: str, root: int, ranks: Ranks) -> None:
        t = nccl_dtype(self.nccl, x.dtype)
        self._launch("reduce", ranks, lambda c, s: c.reduce(x.data.ptr, out.data.ptr, x.size, t, self._op(op), root, s), [x], [out])

    # All members must start the same calls, so the choice of calls depends on the sizes of the parts, which all of them know, and not on
    # the layout of the parts.

    def all_gather(self, x: Any, parts: Sequence[Any], ranks: Ranks) -> None:
        t, mine = nccl_dtype(self.nccl, x.dtype), ranks.index(self.rank)

        def call(c: Any, s: int) -> None:
            own = self._parts.tight(x)
            if even(parts):
                if not x.size:
                    return
                with self._parts.landing(parts, together=True) as places:
                    c.allGather(own.data.ptr, places[0].data.ptr, x.size, t, s)
                return
            with self._parts.landing(parts) as places, self._group():
                for k, place in enumerate(places):
                    if place.size:
                        c.broadcast((own if k == mine else place).data.ptr, place.data.ptr, place.size, t, k, s)

        self._launch("all_gather", ranks, call, [x], parts)

    def reduce_scatter(self, parts: Sequence[Any], out: Any, op: str, ranks: Ranks) -> None:
        t, mine = nccl_dtype(self.nccl, out.dtype), ranks.index(self.rank)

        def call(c: Any, s: int) -> None:
            if even(parts) and not out.size:
                return
            with self._parts.landing([out]) as (place,):
                if even(parts):
                    row = self._parts.together(parts)
                    c.reduceScatter(row.data.ptr, place.data.ptr, out.size, t, self._op(op), s)
                    return
                tight = [self._parts.tight(p) for p in parts]
                with self._group():
                    for k, p in enumerate(tight):
                        if p.size:
                            c.reduce(p.data.ptr, (place if k == mine else p).data.ptr, p.size, t, self._op(op), k, s)

        self._launch("reduce_scatter", ranks, call, parts, [*parts, out])

    def all_to_all(self, sends: Sequence[Any], recvs: Sequence[Any], ranks: Ranks) -> None:
        self._hand("all_to_all", ranks, list(enumerate(sends)), list(enumerate(recvs)))

    def scatter(self, parts: Sequence[Any], out: Any, root: int, ranks: Ranks) -> None:
        self._hand("scatter", ranks, list(enumerate(parts)) if ranks[root] == self.rank else [], [(root, out)])

    def gather(self, x: Any, parts: Sequence[Any], root: int, ranks: Ranks) -> None:
        self._hand("gather", ranks, [(root, x)], list(enumerate(parts)) if ranks[root] == self.rank else [])

    def _hand(self, what: str, ranks: Ranks, sends: Sequence[tuple[int, Any]], recvs: Sequence[tuple[int, Any]]) -> None:
        """Send arrays to members of a group, by their index in it, and receive arrays from members."""

        def call(c: Any, s: int) -> None:
            tight = [(k, self._parts.tight(x)) for k, x in sends]
            with self._parts.landing([place for _, place in recvs]) as places, self._group():
                for k, x in tight:
                    if x.size:
                        c.send(x.data.ptr, x.size, nccl_dtype(self.nccl, x.dtype), k, s)
                for (k, _), place in zip(recvs, places, strict=True):
                    if place.size:
                        c.recv(place.data.ptr, place.size, nccl_dtype(self.nccl, place.dtype), k, s)

        self._launch(what, ranks, call, [x for _, x in sends], [out for _, out in recvs])

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        everyone = tuple(range(self.world_size))  # each rank knows only its own messages, so the group is all ranks

        def call(c: Any, s: int) -> None:
            with self._group():
                for x, peer in sends:
                    if x.size:
                        c.send(x.data.ptr, x.size, nccl_dtype(self.nccl, x.dtype), peer, s)
                for out, peer in recvs:
                    if out.size:
                        c.recv(out.data.ptr, out.size, nccl_dtype(self.nccl, out.dtype), peer, s)

        self._launch("send/recv", everyone, call, [x for x, _ in sends], [out for out, _ in recvs])

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)
