"""What the NCCL communicator asks of CuPy, recorded by a stand-in: nothing here needs a GPU."""

import sys
import types

import numpy as np
import pytest

from fluidx.comm.base import CommAborted, CommError, CommTimeout

BOTH = (0, 1)
NUMBERS = {"INT8": 0, "UINT8": 1, "INT32": 2, "UINT32": 3, "INT64": 4, "UINT64": 5, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8, "BFLOAT16": 9}
OPS = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4}


class NcclError(RuntimeError):
    pass


class Array:
    """An array of `size` elements at an address."""

    def __init__(self, address, shape, dtype="float32"):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.flags = types.SimpleNamespace(c_contiguous=True)
        self.data = types.SimpleNamespace(ptr=address)

    def halves(self):
        half = self.shape[0] // 2, *self.shape[1:]
        return [Array(self.data.ptr + k * self.nbytes // 2, half, self.dtype) for k in range(2)]


class Stream:
    def __init__(self, log, name):
        self.log, self.name, self.ptr, self.done = log, name, name, True

    def record(self):
        self.log.append(("record", self.name))
        return f"event of {self.name}"

    def wait_event(self, event):
        self.log.append(("wait", self.name, event))


@pytest.fixture
def world(monkeypatch):
    """A world of two ranks over a recorded nccl module; `world.log` holds the calls."""
    log = []

    class Communicator:
        broken = None

        def __init__(self, n, uid, rank):
            log.append(("init", n, uid, rank))

        def check_async_error(self):
            if self.broken:
                raise self.broken

        def abort(self):
            log.append(("abort",))

        def __getattr__(self, call):
            def record(*args):
                if self.broken:
                    raise self.broken
                log.append((call, *args))

            return record

    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.available, nccl.NcclError, nccl.NcclCommunicator = True, NcclError, Communicator
    nccl.get_version = lambda: 22800
    nccl.get_unique_id = lambda: f"id{sum(e[0] == 'id' for e in log)}" if not log.append(("id",)) else ""
    nccl.groupStart, nccl.groupEnd = (lambda: log.append(("start",))), (lambda: log.append(("end",)))
    for name, number in (NUMBERS | OPS).items():
        setattr(nccl, f"NCCL_{name}", number)
    compute = Stream(log, "compute")

    class Device:
        def __init__(self, number):
            log.append(("device", number))

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.Device, cuda.get_current_stream = nccl, Device, lambda: compute
    cuda.Stream = lambda non_blocking: Stream(log, "comm")
    cupy = types.ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.cuda, cupy.zeros = cuda, lambda n, dtype: Array(900, (n,), dtype)
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    from fluidx.comm.nccl import NcclWorld

    world = NcclWorld([4, 5], timeout=0.05)
    world.log = log
    return world


def calls(world, *kinds):
    return [e for e in world.log if e[0] in kinds]


def test_each_rank_has_its_device_and_one_communicator_per_group(world):
    a, b = world.communicator(0), world.communicator(1)
    assert calls(world, "device") == [("device", 4), ("device", 5)] and world.communicator(0) is a
    for comm in (a, b, a):
        comm.init_group(BOTH)
    assert calls(world, "id", "init") == [("id",), ("init", 2, "id1", 0), ("init", 2, "id1", 1)]
    b.init_group((1,))
    assert calls(world, "init")[-1] == ("init", 1, "id2", 0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "int32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"])
def test_the_numbers_of_dtypes(world, dtype):
    import ml_dtypes

    real = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    world.communicator(0).broadcast(Array(100, (6,), real), Array(200, (6,), real), 1, BOTH)
    number = NUMBERS["UINT8" if dtype == "bool" else dtype.upper()]
    assert calls(world, "broadcast") == [("broadcast", 100, 200, 6, number, 1, "comm")]


def test_a_dtype_that_nccl_does_not_know(world):
    with pytest.raises(CommError, match="^NCCL cannot send int16; cast it first$"):
        world.communicator(0).all_reduce(Array(1, (2,), "int16"), Array(1, (2,), "int16"), "sum", BOTH)


def test_counts_are_those_that_each_call_counts_by(world):
    c, x, out = world.communicator(0), Array(100, (4, 3)), Array(200, (8, 3))
    c.all_reduce(x, x, "avg", BOTH)
    c.reduce(x, x, "max", 1, BOTH)
    c.all_gather(x, out.halves(), BOTH)  # counts what is sent
    c.reduce_scatter(out.halves(), x, "sum", BOTH)  # counts what is received
    assert calls(world, "allReduce", "reduce", "allGather", "reduceScatter") == [
        ("allReduce", 100, 100, 12, 7, 4, "comm"),
        ("reduce", 100, 100, 12, 7, 2, 1, "comm"),
        ("allGather", 100, 200, 12, 7, "comm"),
        ("reduceScatter", 200, 100, 12, 7, 0, "comm"),
    ]


def test_communication_waits_for_compute_and_compute_where_the_plan_says(world):
    c, x = world.communicator(0), Array(100, (4,))
    c.init_group(BOTH)
    del world.log[:]
    c.all_reduce(x, x, "sum", BOTH)
    assert world.log == [
        ("record", "compute"),
        ("wait", "comm", "event of compute"),
        ("allReduce", 100, 100, 4, 7, 0, "comm"),
    ]
    del world.log[:]
    c.order_after(c.mark())
    assert world.log == [("record", "comm"), ("wait", "compute", "event of comm")]


def test_messages_travel_as_one_group(world):
    c = world.communicator(0)
    c.exchange([(Array(100, (3,)), 1), (Array(200, (2,), "int64"), 1)], [(Array(300, (5,)), 1)])
    assert calls(world, "start", "send", "recv", "end") == [
        ("start",), ("send", 100, 3, 7, 1, "comm"), ("send", 200, 2, 4, 1, "comm"), ("recv", 300, 5, 7, 1, "comm"), ("end",),
    ]  # fmt: skip


def test_a_root_hands_out_parts_and_gets_parts_by_sends_and_receives(world):
    whole, part = Array(1000, (4, 2)), Array(2000, (2, 2))
    world.communicator(1).scatter(whole.halves(), part, 1, BOTH)
    assert calls(world, "start", "send", "recv", "end") == [
        ("start",), ("send", 1000, 4, 7, 0, "comm"), ("send", 1016, 4, 7, 1, "comm"), ("recv", 2000, 4, 7, 1, "comm"), ("end",),
    ]  # fmt: skip
    world.log.clear()
    world.communicator(1).gather(part, whole.halves(), 0, BOTH)  # it is not the root
    assert calls(world, "start", "send", "recv", "end") == [("start",), ("send", 2000, 4, 7, 0, "comm"), ("end",)]


def test_all_to_all_is_sends_and_receives(world):
    world.communicator(1).all_to_all(Array(1000, (4, 2)).halves(), Array(2000, (4, 2)).halves(), BOTH)
    assert calls(world, "start", "send", "recv", "end") == [
        ("start",), ("send", 1000, 4, 7, 0, "comm"), ("send", 1016, 4, 7, 1, "comm"),
        ("recv", 2000, 4, 7, 0, "comm"), ("recv", 2016, 4, 7, 1, "comm"), ("end",),
    ]  # fmt: skip


def test_a_group_is_closed_even_when_a_call_in_it_fails(world):
    c = world.communicator(0)
    c.init_group(BOTH)
    c._comms[BOTH].broken = NcclError("unhandled system error")
    with pytest.raises(CommError, match="^rank 0: NCCL send/recv failed: unhandled system error$"):
        c.exchange([(Array(100, (3,)), 1)], [])
    assert calls(world, "start", "end") == [("start",), ("end",)]


@pytest.mark.parametrize("error, text", [(NcclError("invalid usage"), "failed: invalid usage"), (KeyError(7), "failed with status 7")])
def test_errors_name_the_rank_and_the_call(world, error, text):
    c, x = world.communicator(1), Array(100, (4,))
    c.init_group(BOTH)
    c._comms[BOTH].broken = error
    with pytest.raises(CommError, match=f"^rank 1: NCCL all_reduce {text}$"):
        c.all_reduce(x, x, "sum", BOTH)


def test_work_in_progress_is_no_failure(world):
    c = world.communicator(0)
    c.init_group(BOTH)
    c.wait()
    c.stream.done = False
    c._comms[BOTH].broken = KeyError(7)  # ncclInProgress
    with pytest.raises(CommTimeout, match="^rank 0 waited 0.05 s for NCCL$"):
        c.wait()
    c._comms[BOTH].broken = KeyError(8)
    with pytest.raises(CommError, match=r"^rank 0: NCCL over ranks \(0, 1\) failed with status 8$"):
        c.wait()


def test_an_abort_reaches_every_communicator_once_and_stops_later_calls(world):
    a, b = world.communicator(0), world.communicator(1)
    a.init_group(BOTH), b.init_group(BOTH), b.init_group((1,))
    a.abort(ValueError("gone"))
    b.abort(ValueError("gone too"))
    assert calls(world, "abort") == [("abort",)] * 3
    x = Array(100, (4,))
    for call in (lambda: b.all_reduce(x, x, "sum", BOTH), lambda: b.barrier(BOTH), lambda: b.exchange([(x, 0)], [])):
        with pytest.raises(CommAborted, match="^stopped because another rank failed: gone$"):
            call()
    world.reset()
    a.init_group(BOTH)
    assert calls(world, "init")[-1] == ("init", 2, "id3", 0)  # a new id, for the old communicators are gone
    world.close()
    assert len(calls(world, "abort")) == 4


def test_without_nccl_it_says_what_to_install(world, monkeypatch):
    from fluidx.comm.nccl import NcclWorld

    sys.modules["cupy.cuda.nccl"].available = False
    with pytest.raises(CommError, match="CuPy finds no libnccl; pip install nvidia-nccl-cu13"):
        NcclWorld([0])
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    with pytest.raises(CommError, match="NCCL needs CuPy, which is not installed"):
        NcclWorld([0])
