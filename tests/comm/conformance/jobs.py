"""What each rank does in the tests of this folder: functions of a communicator and plain numbers, which a process is told by name.

A job compares what it gets with NumPy itself; what it returns is for the test to compare among the ranks.
"""

import sys
import threading
import time
from functools import cache

import ml_dtypes
import numpy as np

from fluidx.comm import CommAborted, CommTimeout
from tests.comm import fake_nccl

DTYPES = {t.name: t for t in map(np.dtype, ("float32", "float64", "float16", ml_dtypes.bfloat16, "int64", "int32"))}
MOVED = {**DTYPES, "bool": np.dtype(bool), "uint8": np.dtype("uint8")}
NUMPY = {
    "sum": lambda a: a.sum(0),
    "avg": lambda a: a.sum(0) / len(a),
    "max": lambda a: a.max(0),
    "min": lambda a: a.min(0),
    "prod": lambda a: a.prod(0),
}


def terms(ranks, shape, dtype):
    """What each rank brings: small integers, of which every reduction is exact in every dtype."""
    return [np.random.default_rng(r).integers(1, 4, shape).astype(dtype) for r in ranks]


def reduced(op, xs):
    want = NUMPY[op](np.stack([x.astype("float64") for x in xs]))
    return (np.trunc(want) if xs[0].dtype.kind == "i" else want).astype(xs[0].dtype)


def unlike(x):
    return np.full(x.shape, 7).astype(x.dtype)


def cut(x, n):
    """Unequal parts along the first axis: the first rank has none."""
    marks = [0, *(k * (k + 1) // 2 * len(x) // (n * (n - 1) // 2 or 1) for k in range(n - 1)), len(x)]
    return [x[a:b] for a, b in zip(marks, marks[1:], strict=False)]


def reductions(comm, ranks, shape, name):
    ranks, me = tuple(ranks), comm.rank
    if me not in ranks:
        return
    xs = terms(ranks, shape, DTYPES[name])
    mine, root = xs[ranks.index(me)], len(ranks) - 1
    for op in NUMPY:
        want = reduced(op, xs)
        for same in (False, True):
            x = mine.copy()
            out = x if same else unlike(x)
            comm.all_reduce(x, out, op, ranks)
            assert np.array_equal(out, want) and (same or np.array_equal(x, mine)), (op, same)
            x = mine.copy()
            out = x if same else unlike(x)
            before = out.copy()
            comm.reduce(x, out, op, root, ranks)
            assert np.array_equal(out, want if ranks[root] == me else before), (op, same)


def scattered(comm, ranks, shape, name):
    ranks, me = tuple(ranks), comm.rank
    if me not in ranks:
        return
    n, k = len(ranks), ranks.index(me)
    xs = terms(ranks, shape, DTYPES[name])
    for op in NUMPY:
        x, want = xs[k].copy(), cut(reduced(op, xs), n)[k]
        out = unlike(want)
        comm.reduce_scatter(cut(x, n), out, op, ranks)
        assert np.array_equal(out, want), op
        comm.reduce_scatter(cut(x, n), cut(x, n)[k], op, ranks)  # in the place of what I bring
        assert np.array_equal(cut(x, n)[k], want), op


def moves(comm, ranks, shape, name):
    ranks, me = tuple(ranks), comm.rank
    if me not in ranks:
        return
    n, k = len(ranks), ranks.index(me)
    xs = terms(ranks, shape, MOVED[name])
    for root in range(n):
        out = unlike(xs[k])
        comm.broadcast(xs[k].copy(), out, root, ranks)
        assert np.array_equal(out, xs[root])
    whole, got = xs[0], unlike(xs[0])
    comm.all_gather(cut(whole, n)[k].copy(), cut(got, n), ranks)
    assert np.array_equal(got, whole)
    got = unlike(whole)
    cut(got, n)[k][...] = cut(whole, n)[k]
    comm.all_gather(cut(got, n)[k], cut(got, n), ranks)  # mine lies in its place already
    assert np.array_equal(got, whole)
    for root in range(n):
        rooted(comm, ranks, root, xs)
    recvs = [unlike(cut(x, n)[k]) for x in xs]
    comm.all_to_all(cut(xs[k], n), recvs, ranks)
    assert all(np.array_equal(r, cut(x, n)[k]) for r, x in zip(recvs, xs, strict=True))
    if len(shape) == 2:  # columns do not lie in one piece
        columns = np.empty_like(whole.T)
        comm.all_gather(cut(np.ascontiguousarray(whole.T), n)[k].copy().T, [c.T for c in cut(columns, n)], ranks)
        assert np.array_equal(columns, whole.T)


def rooted(comm, ranks, root, xs):
    """A root gives each rank its part, and gets a part from each; what others name as the whole is neither read nor written."""
    n, k = len(ranks), ranks.index(comm.rank)
    whole = xs[root] if k == root else unlike(xs[root])
    want = cut(xs[root], n)[k]
    for same in (False, True):  # my part may lie in its place already
        given, got = whole.copy(), unlike(whole)
        part = cut(given, n)[k] if same and k == root else unlike(want)
        comm.scatter(cut(given, n), part, root, ranks)
        assert np.array_equal(part, want) and np.array_equal(given, whole), (root, same)
        mine = cut(got, n)[k] if same and k == root else want.copy()
        mine[...] = want
        comm.gather(mine, cut(got, n), root, ranks)
        assert np.array_equal(got, xs[root] if k == root else unlike(whole)), (root, same)
    if whole.ndim == 2:  # columns do not lie in one piece
        columns, part = np.ascontiguousarray(whole.T), unlike(want)
        comm.scatter(cut(columns.T, n), part, root, ranks)
        assert np.array_equal(part, want), root
        columns[...] = unlike(columns)
        comm.gather(part, cut(columns.T, n), root, ranks)
        assert np.array_equal(columns.T, xs[root] if k == root else unlike(whole)), root


def messages(comm, ranks, shape, name):
    """Everyone sends two messages to everyone, itself too, and all cross."""
    ranks, me = tuple(ranks), comm.rank
    if me not in ranks:
        return
    sends = {(me, to, k): terms([1000 * me + 10 * to + k], shape, MOVED[name])[0] for to in ranks for k in (0, 1)}
    wanted = {(at, me, k): terms([1000 * at + 10 * me + k], shape, MOVED[name])[0] for at in ranks for k in (0, 1)}
    got = {key: unlike(x) for key, x in wanted.items()}
    comm.exchange([(x, key[1]) for key, x in sends.items()], [(x, key[0]) for key, x in got.items()])
    assert all(np.array_equal(got[key], x) for key, x in wanted.items())


def many_ahead(comm, count, size):
    """Messages that nobody waits for yet; their sender changes what it sent at once."""
    if comm.rank == 0:
        x = np.empty(size)
        for k in range(count):
            x[:] = k
            comm.exchange([(x, 1)], [])
        x[:] = -1
    comm.barrier((0, 1))
    if comm.rank == 1:
        x = np.empty(size)
        for k in range(count):
            comm.exchange([], [(x, 0)])
            assert (x == k).all()


def bits(comm, size, op):
    """Reductions of numbers of which sums depend on their order."""
    ranks = tuple(range(comm.world_size))
    x = np.random.default_rng(comm.rank).standard_normal(size, "float32")
    whole, part = np.empty_like(x), np.empty_like(cut(x, len(ranks))[comm.rank])
    comm.all_reduce(x, whole, op, ranks)
    comm.reduce_scatter(cut(x, len(ranks)), part, op, ranks)
    assert part.tobytes() == cut(whole, len(ranks))[comm.rank].tobytes()
    return whole.view("uint32").tolist()


def overlapping_groups(comm, rounds):
    """Members of one group are members of others, which meet by turns: pairs (0, 1), (1, 2), ..., then all, in an order of their own."""
    n, me = comm.world_size, comm.rank
    backwards, x = tuple(range(n))[::-1], np.empty(1)
    for ranks in ((*((r, r + 1) for r in range(n - 1)), backwards)) * rounds:
        if me in ranks:
            comm.all_reduce(np.array([10.0**me]), x, "sum", ranks)
            assert x.item() == sum(10.0**r for r in ranks)
    parts = [np.empty(1) for _ in range(n)]
    comm.all_gather(np.array([float(me)]), parts, backwards)
    return [p.item() for p in parts]


def side_by_side(comm, rounds):
    """Groups without a common member take different numbers of meetings."""
    mine = tuple(r for r in range(comm.world_size) if r % 2 == comm.rank % 2)
    x = np.full(5000, 1.0)
    for _ in range(rounds * (1 + comm.rank % 2)):
        comm.all_reduce(x, x, "max", mine)
    comm.init_group(tuple(range(comm.world_size)))


def call(comm, what, ranks):
    """One call among `ranks`, of sizes on both sides of where ranks share the work."""
    ranks, x = tuple(ranks), np.ones(10_000)
    match what:
        case "barrier":
            comm.barrier(ranks)
        case "all_reduce":
            comm.all_reduce(x, x, "sum", ranks)
        case "all_gather":
            comm.all_gather(x[:1].copy(), [x[k : k + 1] for k in range(len(ranks))], ranks)
        case "int":
            y = np.ones(3, "int64")
            comm.all_reduce(y, y, "sum", ranks)
        case "recv":
            comm.exchange([], [(x, ranks[1])])
        case "send":
            comm.exchange([(np.ones(100_000), ranks[1])], [])


def without(comm, what, ranks, missing):
    if comm.rank not in missing:
        call(comm, what, ranks)


def raises(comm, what, ranks, who):
    """One rank fails of its own accord while the others wait for it. They stop because of that, and not because it is late."""
    if comm.rank == who:
        raise ValueError("of all things")
    try:
        call(comm, what, ranks)
    except CommTimeout:
        raise AssertionError("it was not told") from None
    except CommAborted as e:
        assert "of all things" in str(e)
        raise


def disagree(comm, how):
    x = np.ones(4)
    match how:
        case "shape":
            y = np.ones(4 + comm.rank)
            comm.all_reduce(y, y, "sum", (0, 1))
        case "op":
            comm.all_reduce(x, x, ("sum", "max")[comm.rank], (0, 1))
        case "call":
            comm.barrier((0, 1)) if comm.rank else comm.all_reduce(x, x, "sum", (0, 1))
        case "root":
            comm.broadcast(x, x.copy(), comm.rank, (0, 1))
        case "dtype":
            y = x.astype(("float32", "float64")[comm.rank])
            comm.all_reduce(y, y, "sum", (0, 1))
        case "part":
            comm.all_gather(np.ones(1 + comm.rank), [np.empty(1), np.empty(1)], (0, 1))
        case "message":
            comm.exchange([(x, 1)], []) if comm.rank == 0 else comm.exchange([], [(np.empty(5), 0)])
            comm.barrier((0, 1))


def paces(comm, steps):
    """Two threads of a rank wait for one another by turns."""
    seen = []

    def beside():
        for k in range(1, steps + 1):
            comm.follow(True, k)
            seen.append(k)
            comm.reach(True, k)

    other = threading.Thread(target=beside)
    other.start()
    for k in range(1, steps + 1):
        comm.reach(False, k)
        comm.follow(False, k)
        assert seen[-1] == k
    other.join()


# -- over NCCL ---------------------------------------------------------------------------------------------------------------


def on_gpus(comm, job, *args):
    """A job on ranks that have a GPU each, which is played."""
    return globals()[job](OnGpu(_gpu(comm)), *args)


@cache
def _gpu(comm):
    sys.modules.update(fake_nccl.modules(fake_nccl.Processes(lambda: comm))[0])
    from fluidx.comm.nccl import LaunchedNcclWorld

    made = LaunchedNcclWorld([comm], [comm.rank]).communicator(comm.rank)
    made.init_group(tuple(range(comm.world_size)))  # messages go by it, as an executor knows
    return made


class OnGpu:
    """A communicator of a GPU that takes arrays of NumPy, and waits for each call."""

    def __init__(self, comm):
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size

    def __getattr__(self, name):
        def do(*args):
            getattr(self.comm, name)(*map(_there, args))
            self.comm.wait()

        return do


def _there(x):
    if isinstance(x, (list, tuple)):
        return type(x)(map(_there, x))
    return x.view(fake_nccl.Array) if isinstance(x, np.ndarray) else x


# -- worlds ------------------------------------------------------------------------------------------------------------------


def world_of_ranks(comm):
    """What a world says of itself, and whether a run may begin."""
    world, everyone = comm.world, tuple(range(comm.world_size))
    world.check()
    world.begin()
    comm.barrier(everyone)
    assert world.timeout > 0 and isinstance(world.threaded, bool)
    assert world.shared is None or not world.shared.failed()
    return [world.world_size, world.communicator(comm.rank).rank == comm.rank]


def fails_for_all(comm):
    """Rank 1 gives the reason; each rank learns it, and a later reason changes nothing."""
    world, everyone = comm.world, tuple(range(comm.world_size))
    comm.barrier(everyone)
    if comm.rank == 1:
        world.abort(ValueError("of all things"))
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            world.check()
        except CommAborted as e:
            assert "of all things" in str(e), str(e)
            world.abort(ValueError("something else"))
            break
        time.sleep(0.001)
    else:
        raise AssertionError("it was not told")
    try:
        comm.barrier(everyone)
    except CommAborted as e:
        assert "of all things" in str(e), str(e)
        raise
    raise AssertionError("ranks meet after a failure")


def others_are_elsewhere(comm):
    """A process has the communicators of its own ranks; threads of one process have all."""
    other = 1 - comm.rank
    try:
        found = comm.world.communicator(other)
    except ValueError as e:
        assert str(e) == f"this process is rank {comm.rank}, not {other}"
    else:
        assert found.rank == other and threading.current_thread() is not threading.main_thread()
