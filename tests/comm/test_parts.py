"""all_gather, reduce_scatter and all_to_all over parts of any sizes and strides, against NumPy; by rank threads and by NCCL's calls."""

import sys
import threading
from itertools import pairwise

import numpy as np
import pytest

from fluidx.comm import CommError, ThreadWorld
from fluidx.ir import np_dtype
from fluidx.ir.parts import bounds
from fluidx.testing import each_rank
from tests.comm import fake_nccl
from tests.sweep import ALL

REDUCE = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
# the last four are done by all ranks in shares; of these some have rows that do not fit into one block
SHAPES = [(5, 7, 3), (2, 3), (4, 4), (1, 6), (0, 3), (8, 12), (70, 3, 90), (3, 100_003), (9001, 2), (2, 3, 40_001)]


@pytest.fixture(params=["threads", "nccl"])
def ranks(request, monkeypatch):
    """`ranks(n, job)`: what `job(communicator, array)` gives on n ranks; `array` makes arrays that they can take."""
    if request.param == "threads":
        return lambda n, job: each_rank(n, lambda comm: job(comm, np.array))
    modules, calls = fake_nccl.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from fluidx.comm.nccl import NcclWorld

    def run(n, job):
        world = NcclWorld(list(range(n)), timeout=5.0)
        made = threading.Lock()  # the GPUs' communicators are made one after the other, as the executor makes them

        def one(comm):
            with made:
                own = world.communicator(comm.rank)
            return job(own, lambda a: np.array(a).view(fake_nccl.Array))

        return each_rank(n, one)

    run.calls = calls
    return run


def numbers(shape, dtype, seed):
    """Small integers: every reduction of them is exact in every dtype."""
    return np.random.default_rng(seed).integers(1, 4, shape).astype(np_dtype(dtype))


def cuts(size, n, seed):
    """Ways to cut an axis among n ranks: as placements do, with blocks of 2, all to the last rank, and at random."""
    rng = np.random.default_rng(seed)
    yield bounds(size, n)
    yield bounds(size, n, 2)
    yield [0] * n + [size]
    yield [0, *sorted(rng.integers(0, size + 1, n - 1).tolist()), size]


def along(whole, axis, where):
    """Views of the parts of `whole` between neighbours in `where`."""
    return [whole[(slice(None),) * axis + (slice(a, b),)] for a, b in pairwise(where)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_gathered_is_the_whole_and_what_is_scattered_a_part_of_the_reduction(ranks, shape, n):
    everyone = tuple(range(n))
    large = np.prod(shape) > 10_000
    for k, dtype in enumerate(("float32",) if large else ("float32", "float16", "bfloat16", "int64")):
        whole, terms = numbers(shape, dtype, 1), [numbers(shape, dtype, 10 + r) for r in range(n)]
        op = list(REDUCE)[(k + n) % 4]
        total = REDUCE[op](np.stack(terms).astype("float64"), axis=0).astype(whole.dtype)
        for axis in range(len(shape)):
            for at, where in enumerate(cuts(shape[axis], n, n)):
                if not ALL and (k + at + axis) % 2:
                    continue

                def job(comm, array, axis=axis, where=where, whole=whole, terms=terms, op=op):
                    r = comm.rank
                    gathered, again = array(np.full_like(whole, 77)), array(np.full_like(whole, 77))
                    comm.all_gather(array(along(whole, axis, where)[r]), along(gathered, axis, where), everyone)
                    mine = along(again, axis, where)[r]
                    mine[...] = along(whole, axis, where)[r]
                    comm.all_gather(mine, along(again, axis, where), everyone)  # what I give lies in its place already
                    part = array(np.full_like(along(whole, axis, where)[r], 77))
                    comm.reduce_scatter(along(array(terms[r]), axis, where), part, op, everyone)
                    x = array(terms[r])
                    comm.reduce_scatter(along(x, axis, where), along(x, axis, where)[r], op, everyone)
                    comm.barrier(everyone)
                    return gathered, again, part, along(x, axis, where)[r]

                for r, (gathered, again, part, in_place) in enumerate(ranks(n, job)):
                    want = along(total, axis, where)[r]
                    assert np.array_equal(gathered, whole) and np.array_equal(again, whole), (axis, where)
                    assert np.array_equal(part, want) and np.array_equal(in_place, want), (axis, where)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] < 9000], ids=str)
def test_all_to_all_moves_a_cut_from_one_axis_to_another(ranks, shape, n):
    everyone = tuple(range(n))
    whole = numbers(shape, "float32", 3)
    for a, b in [(0, 1), (1, 0), (len(shape) - 1, 0)]:
        for here, there in zip(cuts(shape[a], n, 5), [*cuts(shape[b], n, 6)][::-1], strict=True):

            def job(comm, array, a=a, b=b, here=here, there=there):
                x = array(along(whole, a, here)[comm.rank])
                out = array(np.full_like(along(whole, b, there)[comm.rank], 77))
                comm.all_to_all(along(x, b, there), along(out, a, here), everyone)
                return out

            for r, out in enumerate(ranks(n, job)):
                assert np.array_equal(out, along(whole, b, there)[r]), (a, b, here, there)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_messages_of_sizes_that_differ_for_each_pair(ranks, n):
    """Rank i sends i * j elements to rank j; some pairs exchange little and some much, and many nothing."""
    for size in (1, 3000):

        def job(comm, array, size=size):
            r = comm.rank
            sends = [array(np.full(size * r * j, 10.0 * r + j)) for j in range(n)]
            recvs = [array(np.full(size * i * r, 77.0)) for i in range(n)]
            comm.all_to_all(sends, recvs, tuple(range(n)))
            return recvs

        for r, recvs in enumerate(ranks(n, job)):
            assert all(np.all(x == 10.0 * i + r) and x.size == size * i * r for i, x in enumerate(recvs))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("size", [90, 300_000])
def test_a_reduction_in_parts_gives_the_bits_of_an_all_reduce(op, size):
    terms = [np.random.default_rng(r).standard_normal((3, size // 3), "float32") for r in range(4)]
    for axis, where in [(1, [0, 7, 7, 60, size // 3]), (1, bounds(size // 3, 4)), (0, [0, 1, 1, 3, 3])]:

        def job(comm, axis=axis, where=where):
            whole = np.empty_like(terms[0])
            comm.all_reduce(terms[comm.rank], whole, op, (0, 1, 2, 3))
            part = np.empty_like(along(whole, axis, where)[comm.rank])
            comm.reduce_scatter(along(terms[comm.rank], axis, where), part, op, (0, 1, 2, 3))
            return part.tobytes(), np.ascontiguousarray(along(whole, axis, where)[comm.rank]).tobytes()

        for part, want in each_rank(4, job):
            assert part == want


def test_short_floats_in_parts_are_added_in_float32():
    # 2048 + 1 is not a float16
    terms = [np.float16([[2048, 1, 5]]), np.float16([[1, 1, 5]]), np.float16([[1, 1, 5]])]

    def job(comm):
        part = np.empty((1, 3 * (comm.rank == 1)), "float16")
        comm.reduce_scatter(along(terms[comm.rank], 1, [0, 0, 3, 3]), part, "sum", (0, 1, 2))
        return part.tolist()

    assert each_rank(3, job) == [[[]], [[2050, 3, 15]], [[]]]


def test_a_group_that_is_a_subset_has_its_own_order(ranks):
    def job(comm, array):
        if comm.rank == 1:
            return None
        order = (2, 0)
        whole = array(np.zeros((1, 5)))
        mine = order.index(comm.rank)
        comm.all_gather(array(np.full((1, (2, 3)[mine]), 1.0 + comm.rank)), along(whole, 1, [0, 2, 5]), order)
        return whole.tolist()

    a, _, b = ranks(3, job)
    assert a == b == [[3, 3, 1, 1, 1]]


@pytest.mark.parametrize("rank_sizes, calls", [((4, 4), {"allGather", "reduceScatter"}), ((5, 3), {"broadcast", "reduce"})])
def test_nccl_is_asked_for_its_own_collective_where_all_parts_have_one_size(monkeypatch, rank_sizes, calls):
    modules, seen = fake_nccl.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from fluidx.comm.nccl import NcclWorld

    world = NcclWorld([0, 1])
    both = [world.communicator(r) for r in range(2)]
    where = [0, rank_sizes[0], 8]

    def job(comm):
        nccl = both[comm.rank]
        x = np.ones((3, 8), "float32").view(fake_nccl.Array)
        for whole, axis in ((x, 1), (x.reshape(8, 3), 0)):
            parts = along(whole, axis, where)
            part = np.array(parts[comm.rank]).view(fake_nccl.Array)
            nccl.reduce_scatter(parts, part, "sum", (0, 1))
            nccl.all_gather(part, parts, (0, 1))
        nothing = np.ones((0, 3), "float32").view(fake_nccl.Array)
        nccl.all_gather(nothing, [nothing] * 2, (0, 1))
        nccl.reduce_scatter([nothing] * 2, nothing, "sum", (0, 1))
        return x.tolist()

    assert each_rank(2, job) == [[[4] * 8] * 3] * 2
    assert {name for name, _ in seen} == calls


# -- ranks that disagree -------------------------------------------------------------------------------------------------------


def fails(n, job):
    with pytest.raises(CommError) as error:
        each_rank(n, job, timeout=2.0)
    assert not [t for t in threading.enumerate() if t.name.startswith("fluidx-test")]
    return str(error.value)


@pytest.mark.parametrize("size", [4, 100_000])
def test_sizes_are_compared_pair_by_pair(size):
    x = np.ones(size)

    def gather(comm):
        whole = np.ones(2 * size)
        comm.all_gather(x[: size - comm.rank], [whole[:size], whole[size:]], (0, 1))

    def scatter(comm):
        comm.reduce_scatter([x[:2], x[2:]], np.ones(2 if comm.rank == 0 else size - 1), "sum", (0, 1))

    def to_all(comm):
        sends = [x[:1], x[1:]] if comm.rank == 0 else [x[:2], x[2:]]
        comm.all_to_all(sends, [np.ones(1), np.ones(size - 1 if comm.rank else 1)], (0, 1))

    assert fails(2, gather) == (
        f"ranks disagree: rank 0 expects float64[{size}] from rank 1 in all_gather, which gives float64[{size - 1}]"
    )
    assert fails(2, scatter) == (
        f"ranks disagree: rank 1 expects float64[{size - 1}] from rank 0 in reduce_scatter, which gives float64[{size - 2}]"
    )
    assert fails(2, to_all) == "ranks disagree: rank 0 expects float64[1] from rank 1 in all_to_all, which gives float64[2]"


def test_ranks_of_which_one_brings_little_and_one_much_disagree_and_do_not_hang():
    """Which rank does the work depends on the sizes; ranks that know different sizes must still meet."""

    def job(comm):
        sends = [np.ones(1 + 9999 * comm.rank), np.ones(1 + 9999 * comm.rank)]
        comm.all_to_all(sends, [np.ones(1), np.ones(1)], (0, 1))

    for _ in range(20):
        assert "which gives float64[10000]" in fails(2, job)

    def fine(comm):
        recvs = [np.empty((1, 20_000)[i] if comm.rank == i else 1) for i in range(2)]
        comm.all_to_all([np.full((1, 20_000)[comm.rank] if j == comm.rank else 1, 1.0 + comm.rank) for j in range(2)], recvs, (0, 1))
        return [float(x.sum()) for x in recvs]

    for _ in range(20):
        assert each_rank(2, fine) == [[1, 2], [1, 40_000]]


def test_other_disagreements_of_calls_with_parts():
    x = np.ones(4, "float32")

    def dtypes(comm):
        y = x.astype(("float32", "float64")[comm.rank])
        comm.all_gather(y, [y.copy(), y.copy()], (0, 1))

    def ops(comm):
        comm.reduce_scatter([x, x], x.copy(), ("sum", "max")[comm.rank], (0, 1))

    def calls(comm):
        comm.all_gather(x, [x.copy(), x.copy()], (0, 1)) if comm.rank else comm.all_reduce(x, x.copy(), "sum", (0, 1))

    def counts(comm):
        comm.all_to_all([x] * (2 + comm.rank), [x.copy()] * (2 + comm.rank), (0, 1))

    assert fails(2, dtypes) == "ranks disagree: rank 0 is in all_gather of float32[4], rank 1 in all_gather of float64[4]"
    assert fails(2, ops) == (
        "ranks disagree: rank 0 is in reduce_scatter (sum) of float32 in 2 parts, rank 1 in reduce_scatter (max) of float32 in 2 parts"
    )
    assert fails(2, calls) == "ranks disagree: rank 0 is in all_reduce (sum) of float32[4], rank 1 in all_gather of float32[4]"
    assert fails(2, counts) == "ranks disagree: rank 1 passes 3 parts to all_to_all and expects 3, in a group of 2 ranks"


def test_a_world_of_one_rank_copies():
    x, out = np.arange(6.0).reshape(2, 3), np.empty((2, 3))
    comm = ThreadWorld(1).communicator(0)
    comm.all_gather(x, [out], (0,))
    assert np.array_equal(out, x)
