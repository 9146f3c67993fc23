"""Collectives and messages between rank threads, against NumPy; and the collective operators through programs."""

import threading

import ml_dtypes
import numpy as np
import pytest

import fluidx as fx
from fluidx.comm import CommAborted, CommError, CommTimeout, ThreadWorld
from fluidx.testing import each_rank, run_ranks
from tests.each import each
from tests.sweep import some

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(t) for t in ("float32", "float64", "int64", "float16")] + [BF16]
RANKS = [1, 2, 3, 4, 5]
# the last two are done by all ranks in shares, the others by the last to arrive
SHAPES = [(), (1,), (3,), (2, 5), (7, 3), (0,), (4099,), (3, 40_001)]
NUMPY = {
    "sum": lambda a: a.sum(0),
    "avg": lambda a: a.sum(0) / len(a),
    "max": lambda a: a.max(0),
    "min": lambda a: a.min(0),
    "prod": lambda a: a.prod(0),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_count = pytest.mark.parametrize("n", RANKS)


def inputs(n, shape, dtype, seed=0):
    """Small integers: every reduction of them is exact in every dtype."""
    return [np.random.default_rng(seed + r).integers(1, 4, shape).astype(dtype) for r in range(n)]


def wide(arrays):
    return np.stack([a.astype("float64") for a in arrays])


def out_for(x, shape, same):
    return x if same else np.full(shape, 77).astype(x.dtype)


@every_dtype
@every_count
@each("op", NUMPY)
def test_all_reduce_and_reduce(op, n, dtype):
    everyone = tuple(range(n))
    for shape, same in some(1 if n == 3 else 2, SHAPES, [False, True]):
        xs = inputs(n, shape, dtype)
        want = NUMPY[op](wide(xs))
        want = np.trunc(want) if dtype.kind == "i" else want
        want = want.astype(dtype)

        def job(comm, xs=xs, shape=shape, same=same):
            x = xs[comm.rank].copy()
            total = out_for(x, shape, same)
            comm.all_reduce(x, total, op, everyone)
            root = n - 1
            y = xs[comm.rank].copy()
            at_root = out_for(y, shape, same)
            before = at_root.copy()
            comm.reduce(y, at_root, op, root, everyone)
            return total, at_root, before

        for r, (total, at_root, before) in enumerate(each_rank(n, job)):
            assert total.dtype == dtype and np.array_equal(total, want), shape
            assert np.array_equal(at_root, want if r == n - 1 else before), shape


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(bool)], ids=str)
@every_count
@each("same", [False, True])
def test_broadcast(n, dtype, same):
    everyone = tuple(range(n))
    for shape in SHAPES:
        xs = inputs(n, shape, dtype)
        xs[0][...] = 0

        def job(comm, xs=xs, shape=shape):
            x = xs[comm.rank].copy()
            out = out_for(x, shape, same)
            comm.broadcast(x, out, 0, everyone)
            return out

        assert all(np.array_equal(out, xs[0]) for out in each_rank(n, job))


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("size", [100, 100_003])
def test_reductions_of_floats_give_the_same_bits_on_every_rank_and_in_every_run(op, size):
    xs = [np.random.default_rng(r).standard_normal(size, "float32") for r in range(5)]

    def job(comm):
        out, part = np.empty_like(xs[0]), np.empty(size, "float32")
        comm.all_reduce(xs[comm.rank], out, op, (0, 1, 2, 3, 4))
        comm.reduce(xs[comm.rank], part, op, 2, (0, 1, 2, 3, 4))
        return out.tobytes(), part.tobytes()

    runs = [each_rank(5, job) for _ in range(5)]
    assert len({bits for run in runs for bits, _ in run} | {run[2][1] for run in runs}) == 1


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BF16], ids=str)
def test_short_floats_are_added_in_float32(dtype):
    # 2048 + 1 is not a float16, 256 + 1 not a bfloat16; and 40000 + 40000 overflows a float16 before the mean is taken
    big = 2048 if dtype == np.float16 else 256
    rows = [[big, 40000], [1, 40000], [1, 40000]]
    for n, op, want in [(2, "avg", [(big + 1) / 2, 40000]), (3, "sum", [big + 2, None])]:

        def job(comm, n=n, op=op):
            x = np.array(rows[comm.rank]).astype(dtype)
            with np.errstate(over="ignore"):
                comm.all_reduce(x, x, op, tuple(range(n)))
            return x

        for found in each_rank(n, job):
            for a, b in zip(found, want, strict=True):
                assert b is None or a == np.array(b).astype(dtype)


def test_groups_that_are_subsets_work_side_by_side():
    groups = [(0, 2), (1, 3, 4)]

    def job(comm):
        mine = next(g for g in groups if comm.rank in g)
        out = np.empty(1)
        for _ in range(50):
            comm.all_reduce(np.array([10.0**comm.rank]), out, "sum", mine)
        comm.barrier((0, 1, 2, 3, 4))
        from_last = np.empty(1)
        comm.broadcast(np.array([float(comm.rank)]), from_last, len(mine) - 1, mine)
        return out.item(), from_last.item()

    assert each_rank(5, job) == [(101, 2), (11010, 4), (101, 2), (11010, 4), (11010, 4)]


def test_the_order_of_a_group_is_its_own():
    def job(comm):
        out = np.empty(2)
        comm.all_gather(np.array([float(comm.rank)]), [out[:1], out[1:]], (1, 0))
        return out.tolist()

    assert each_rank(2, job) == [[1, 0], [1, 0]]


@pytest.mark.parametrize("size", [1, 8191, 8193, 300_000])
@every_count
def test_crossing_messages_do_not_wait_for_each_other(n, size):
    def job(comm):
        xs = [np.full(size, 10.0 * comm.rank + peer) for peer in range(n)]
        outs = [np.empty(size) for _ in range(n)]
        comm.exchange([(x, p) for p, x in enumerate(xs)], [(o, p) for p, o in enumerate(outs)])
        return [o[[0, -1]].tolist() for o in outs]

    assert each_rank(n, job) == [[[10.0 * p + r] * 2 for p in range(n)] for r in range(n)]


@pytest.mark.parametrize("size", [4, 100_000])
def test_messages_arrive_in_the_order_in_which_they_were_sent(size):
    def job(comm):
        if comm.rank == 0:
            for k in range(20):
                comm.exchange([(np.full(size, float(k)), 1), (np.full(size, k + 0.5), 1)], [])
            return None
        found = []
        for _ in range(20):
            a, b = np.empty(size), np.empty(size)
            comm.exchange([], [(a, 0), (b, 0)])
            found += [a[-1].item(), b[-1].item()]
        return found

    assert each_rank(2, job)[1] == [k / 2 for k in range(40)]


def test_what_was_sent_may_be_changed_once_the_send_is_over():
    for size in (4, 100_000):

        def job(comm, size=size):
            if comm.rank == 0:
                x = np.ones(size)
                comm.exchange([(x, 1)], [])
                x[:] = 2
                return None
            out = np.empty(size)
            comm.exchange([], [(out, 0)])
            return out.sum()

        assert each_rank(2, job)[1] == size


# -- failures ---------------------------------------------------------------------------------------------------------------


def fails(n, job, timeout=0.2):
    with pytest.raises(CommError) as error:
        each_rank(n, job, timeout)
    assert not [t for t in threading.enumerate() if t.name.startswith("fluidx-test")]
    return error.value


@pytest.mark.parametrize("size", [4, 100_000])
def test_ranks_that_disagree_say_so(size):
    x = np.ones(size, "float32")

    def shapes(comm):
        y = np.ones(size + comm.rank, "float32")
        comm.all_reduce(y, y, "sum", (0, 1))

    def ops(comm):
        comm.all_reduce(x.copy(), x.copy(), ("sum", "avg")[comm.rank], (0, 1))

    def calls(comm):
        comm.barrier((0, 1)) if comm.rank else comm.all_reduce(x.copy(), x.copy(), "sum", (0, 1))

    def roots(comm):
        comm.broadcast(x.copy(), x.copy(), comm.rank, (0, 1))

    def dtypes(comm):
        y = x.astype(("float32", "float64")[comm.rank])
        comm.all_reduce(y, y, "sum", (0, 1))

    for job in (shapes, ops, calls, roots, dtypes):
        e = fails(2, job)
        assert str(e).startswith("ranks disagree: rank ") and "rank 0" in str(e) and "rank 1" in str(e)
        assert not isinstance(e, CommTimeout)


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_message_of_another_size_is_refused_and_frees_the_sender(size):
    def job(comm):
        if comm.rank == 0:
            comm.exchange([(np.ones(size), 1)], [])
            comm.barrier((0, 1))
        else:
            comm.exchange([], [(np.ones(size + 1), 0)])

    e = fails(2, job, timeout=5)
    assert str(e) == f"ranks disagree: rank 1 expects float64[{size + 1}] from rank 0, which sent float64[{size}]"


def test_a_rank_that_does_not_come_is_named():
    def job(comm):
        if comm.rank != 1:
            comm.barrier((0, 1, 2))

    e = fails(3, job)
    assert isinstance(e, CommTimeout) and e.rank == 1
    assert str(e).endswith("waited 0.2 s in barrier; rank 1 did not arrive")
    for call, text in [
        (lambda comm: comm.exchange([], [(np.ones(1), 1)]), "recv from rank 1; rank 1 did not arrive"),
        (lambda comm: comm.exchange([(np.ones(100_000), 1)], []), "send to rank 1; rank 1 did not arrive"),
    ]:
        e = fails(2, lambda comm, call=call: call(comm) if comm.rank == 0 else None)
        assert str(e) == f"rank 0 waited 0.2 s in {text}" and e.rank == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda c: c.barrier((0, 1)),
        lambda c: c.all_reduce(np.ones(100_000), np.ones(100_000), "sum", (0, 1)),
        lambda c: c.exchange([], [(np.ones(1), 1)]),
        lambda c: c.exchange([(np.ones(100_000), 1)], []),
    ],
    ids=["barrier", "all_reduce", "recv", "send"],
)
@pytest.mark.parametrize("early", [True, False], ids=["before", "while waiting"])
def test_an_abort_stops_who_waits_and_who_comes_later(wait, early):
    world = ThreadWorld(2, timeout=30)
    comm = world.communicator(0)
    if early:
        world.abort(ValueError("gone"))
    else:
        threading.Timer(0.05, world.abort, [ValueError("gone")]).start()
    with pytest.raises(CommAborted, match="^stopped because another rank failed: gone$"):
        wait(comm)
    world.reset()
    assert world.failure is None


# -- programs ------------------------------------------------------------------------------------------------------------


def test_a_strided_view_is_made_contiguous_before_it_travels():
    p = fx.Program("ranks")
    p.groups = {"dp": ((0, 1),)}
    with fx.program_guard(p, fx.Program()):
        x = fx.data("x", [2, 3], "float32")
        t = fx.layers.transpose(x, [1, 0])
        y = fx.ir.Builder(p.global_block()).all_reduce(t, group="dp", op="sum")
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for (found,) in run_ranks([p, p], [{"x": x}, {"x": x}], [y]):
        assert np.array_equal(found, 2 * x.T)


def test_what_a_batch_sends_is_not_overwritten_by_what_it_receives():
    text = """
program p {
  group dp = [0, 1]
  data %x: f32[40000]
forward:
  %h: f32[40000] = scale(%x) {scale=2.0}
  send(%h) {batch="swap", group="dp", peer=PEER}
  %y: f32[40000] = recv() {batch="swap", group="dp", peer=PEER, shape=[40000]}
  %z: f32[40000] = scale(%y) {scale=1.0}
}
"""
    programs = []
    for r in range(2):
        programs.append(fx.Program.parse_from_string(text.replace("PEER", str(1 - r))))
    feeds = [{"x": np.full(40000, r + 1.0, "float32")} for r in range(2)]
    for _ in range(10):
        (a,), (b,) = run_ranks(programs, feeds, ["z"])
        assert np.all(a == 4) and np.all(b == 2)
