"""Collectives written out by every algorithm: proved, run on ranks, and counted."""

from math import prod

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Program, ProgramPair
from fluidx.ir.errors import TranspileError
from fluidx.testing import run_ranks
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.algorithms import ALGORITHMS, algorithm, schedule
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import verify_ranks

COUNTS = (1, 2, 3, 4, 5, 8)
SHAPES = ([0], [3], [9, 2])  # no elements, fewer than ranks, and what does not divide
BOTH = [a for a in ALGORITHMS if a != "double_binary_tree"]
every_count = pytest.mark.parametrize("n", COUNTS)

SOURCE = """
program sums {
  data %x: f32[COUNT,SHAPE]
  %y: f32[SHAPE] = reduce_sum(%x) {dim=[0]}
}
"""
RANKS = """
program sums {
  group dp = MEMBERS
  data %x: f32[COUNT,SHAPE] shard(0) over dp
  %t: f32[SHAPE] partial(sum) over dp = reduce_sum(%x) {dim=[0]}
dist:
LINES
}
"""


def written(name, n, shape, lines):
    """The source, which adds up 2n arrays, and the programs of n ranks that have two each: `lines` bring the sum of %t to %y."""
    filled = {"COUNT": 2 * n, "LINES": "\n".join(lines), "SHAPE": ",".join(map(str, shape)), "BY": f'algorithm="{name}", group="dp"'}
    texts = [SOURCE, RANKS.replace("MEMBERS", str(list(range(n))))]
    for word, value in filled.items():
        texts = [t.replace(word, str(value)) for t in texts]
    one, all_ranks = map(Program.parse_from_string, texts)
    special = Specializer(all_ranks)
    return one, [special.rank_program(r) for r in range(n)]


def check(name, n, shape, lines):
    """The rank programs are proved, have no collective left, and give every rank the sum."""
    one, ranks = written(name, n, shape, lines)
    startup = Program("startup")
    startups = [Program("startup") for _ in ranks]
    for p in startups:
        p.groups = ranks[0].groups
    verify_ranks(ProgramPair(one, startup), ranks, startups)
    assert not prod(shape) or n == 1 or not any(op.attrs.get("algorithm") for p in ranks for op in p.ops)
    x = np.random.default_rng(3).integers(-9, 10, (2 * n, *shape)).astype("float32")
    assert all((y == x.sum(0)).all() for (y,) in run_ranks(ranks, {"x": x}, ["y"]))
    return ranks


@every_count
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_reduce_is_the_sum_everywhere(name, n):
    for shape in SHAPES:
        check(name, n, shape, ["  %y: f32[SHAPE] = all_reduce(%t) {BY}"])


@every_count
@pytest.mark.parametrize("name", BOTH)
def test_a_reduce_to_any_root_and_a_broadcast_from_it(name, n):
    for shape in SHAPES:
        for root in {0, n - 1}:
            check(name, n, shape, [
                f"  %s: f32[SHAPE] at({root}) over dp = reduce(%t) {{BY, root={root}}}",
                f"  %y: f32[SHAPE] = broadcast(%s) {{BY, root={root}}}",
            ])  # fmt: skip


@every_count
@pytest.mark.parametrize("name", BOTH)
def test_a_reduce_scatter_and_an_all_gather_of_rows_and_of_uneven_pieces(name, n):
    for shape in SHAPES:
        size = prod(shape)
        marks = [0, *(size * k * k // (n * n) for k in range(1, n)), size]  # the first pieces are small or empty
        for place, attrs in (("shard(0)", ""), (f"pieces({', '.join(map(str, marks))})", f", bounds={marks}")):
            if not size and attrs:
                continue
            check(name, n, shape, [
                f"  %s: f32[SHAPE] {place} over dp = reduce_scatter(%t) {{BY{attrs}}}",
                f"  %y: f32[SHAPE] = all_gather(%s) {{BY{attrs}}}",
            ])  # fmt: skip


# -- what is sent -------------------------------------------------------------------------------------------------------------------------


def messages(program):
    """(batch, elements) of each send."""
    block = program.global_block()
    return [(op.attrs["batch"], block.desc(op.input_arg_names[0]).type.numel) for op in program.ops if op.type == "send"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_sends_what_the_schedule_says_in_as_many_batches(name):
    for n in (2, 3, 4, 8):
        size = 24 * n
        _, ranks = written(name, n, [size], ["  %y: f32[SHAPE] = all_reduce(%t) {BY}"])
        rounds, marks = schedule(name, "all_reduce", n), algorithm(name).cut(n, size)
        for r, p in enumerate(ranks):
            expected = [marks[t.stop] - marks[t.start] for a in rounds for t in a if t.source == r and marks[t.start] < marks[t.stop]]
            assert sorted(e for _, e in messages(p)) == sorted(expected)
            assert len({b for b, _ in messages(p)}) <= len(rounds)
        assert len({b for p in ranks for b, _ in messages(p)}) == len(rounds)


def test_values_of_one_wave_share_its_batches_and_what_needs_a_result_waits():
    lines = [
        "  %a: f32[SHAPE] at(0) over dp = reduce(%t) {BY, root=0}",
        "  %b: f32[SHAPE] at(1) over dp = reduce(%t) {BY, root=1}",
        "  %y: f32[SHAPE] = broadcast(%b) {BY, root=1}",
    ]
    _, ranks = written("ring", 3, [4], lines)
    batches = [b.rpartition(".hop")[0] for b, _ in messages(ranks[2])]
    assert len(batches) == 3 and batches[0] == batches[1] != batches[2]  # a and b together, then y
    check("ring", 3, [4], lines)


# -- strategies ---------------------------------------------------------------------------------------------------------------------------

STRATEGIES = {
    "data_parallel": ALGORITHMS,
    "reduce_broadcast": BOTH,
    "ring_optimizer": BOTH,
    "zero1": BOTH,
    "zero2": BOTH,
}


def bit_equal(strategy, trainers):
    """The loss, every gradient and every parameter after a step are those of one device, bit for bit; and the proof finds so."""
    model = integer_mlp()
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, strategy, trainers, feeds, fetch)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(np.array_equal(scope.get(p), state[p]) for p, _ in model.gradients)


PAIRS = [(s, a) for s, names in STRATEGIES.items() for a in names]


@pytest.mark.parametrize("strategy, name", PAIRS)
def test_training_is_bit_equal_by_every_algorithm(strategy, name):
    for ranks in (1, 3, 4):
        bit_equal(fx.strategies.get(strategy, algorithm=name), ranks)


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 3), fx.Cluster(3, 1)], ids=str)
@pytest.mark.parametrize("hierarchical", [True, False, "auto"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_bit_equal_on_several_hosts(strategy, hierarchical, cluster):
    for name in ("tree", "auto") if hierarchical is True else ("",):
        bit_equal(fx.strategies.get(strategy, algorithm=name, hierarchical=hierarchical), cluster)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_carries_sums_between_hosts_and_startup_is_not_asked(name):
    bit_equal(fx.strategies.data_parallel(algorithm=name), fx.Cluster(2, 2))


def test_a_hierarchy_needs_hosts():
    model = integer_mlp()
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(hierarchical=True))
    with pytest.raises(TranspileError, match="hierarchical=True needs several hosts"):
        t.transpile(program=model.main, startup_program=model.startup, trainers=4)
