"""Collectives written out by every algorithm: proved, run on ranks, and counted."""

import re
from functools import cache
from math import prod

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Program, ProgramPair
from fluidx.ir.errors import TranspileError, VerifyError
from fluidx.testing import run_ranks
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.transpiler.algorithms import ALGORITHMS, Algorithm, Transfer, able, algorithm, backwards, schedule
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import verify_ranks
from tests.sweep import swept

COUNTS = (1, 2, 3, 4, 8, 5)  # every second one has powers of two and others
SHAPES = ([0], [3], [9, 2])  # no elements, fewer than ranks, and what does not divide
BOTH = [a for a in ALGORITHMS if a != "double_binary_tree"]

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


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_reduce_is_the_sum_everywhere(name, n):
    for shape in SHAPES:
        check(name, n, shape, ["  %y: f32[SHAPE] = all_reduce(%t) {BY}"])


@swept(2, name=BOTH, n=COUNTS)
def test_a_reduce_to_any_root_and_a_broadcast_from_it(name, n):
    for shape in SHAPES:
        for root in {0, n - 1}:
            check(name, n, shape, [
                f"  %s: f32[SHAPE] at({root}) over dp = reduce(%t) {{BY, root={root}}}",
                f"  %y: f32[SHAPE] = broadcast(%s) {{BY, root={root}}}",
            ])  # fmt: skip


@swept(2, name=BOTH, n=COUNTS)
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


@swept(2, name=BOTH, n=COUNTS)
def test_a_reduce_scatter_and_an_all_gather_of_columns(name, n):
    for shape, axis, unit in (([3, 7], 1, 1), ([3, 7], 1, 2), ([2, 3, 4], 2, 1), ([5, 2], 1, 1)):  # even, uneven and empty parts
        by = f"{{BY, axis={axis}, unit={unit}}}"
        check(name, n, shape, [
            f"  %s: f32[SHAPE] shard({axis}{', 2' if unit > 1 else ''}) over dp = reduce_scatter(%t) {by}",
            f"  %y: f32[SHAPE] = all_gather(%s) {by}",
        ])  # fmt: skip


@swept(2, name=list(ALGORITHMS), n=COUNTS)
def test_an_all_to_all_moves_a_cut_from_any_axis_to_any_other(name, n):
    for shape, axis, to in (([8, 4], 0, 1), ([3, 5], 1, 0), ([2, 3, 4], 1, 2), ([1, 9], 1, 0)):
        check(name, n, shape, [
            f'  %a: f32[SHAPE] shard({axis}) over dp = reduce_scatter(%t) {{axis={axis}, group="dp"}}',
            f"  %b: f32[SHAPE] shard({to}) over dp = all_to_all(%a) {{BY, axis={axis}, to_axis={to}}}",
            f'  %y: f32[SHAPE] = all_gather(%b) {{axis={to}, group="dp"}}',
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_all_to_all_sends_all_but_what_stays_to_each_rank_directly(name):
    for n in (2, 3, 4, 8):
        shape = [2 * n, 3 * n]
        _, ranks = written(name, n, shape, [
            '  %a: f32[SHAPE] shard(0) over dp = reduce_scatter(%t) {group="dp"}',
            "  %b: f32[SHAPE] shard(1) over dp = all_to_all(%a) {BY, to_axis=1}",
            '  %y: f32[SHAPE] = all_gather(%b) {axis=1, group="dp"}',
        ])  # fmt: skip
        for r, p in enumerate(ranks):
            assert [e for _, e in messages(p)] == [6] * (n - 1)  # (n-1)/n of what a rank has
            assert {op.attrs["peer"] for op in p.ops if op.type == "send"} == {k for k in range(n) if k != r}
        hops = {b for p in ranks for b, _ in messages(p)}
        assert len(hops) == (1 if name in ("star", "direct") else n - 1)
        if name not in ("star", "direct"):  # in each round a rank sends to one and receives from one
            for p in ranks:
                assert len({b for b, _ in messages(p)}) == n - 1


COLUMNS = [
    "  %s: f32[SHAPE] shard(1) over dp = reduce_scatter(%t) {BY, axis=1}",
    "  %a: f32[SHAPE] shard(0) over dp = all_to_all(%s) {BY, axis=1, to_axis=0}",
    "  %y: f32[SHAPE] = all_gather(%a) {BY}",
]  # fmt: skip


def test_wrong_boxes_are_refused():
    one, ranks = written("ring", 2, [4, 6], COLUMNS)
    startups = [Program("startup") for _ in ranks]
    for p in startups:
        p.groups = ranks[0].groups
    texts = [str(p) for p in ranks]
    verify_ranks(ProgramPair(one, Program("startup")), [Program.parse_from_string(t) for t in texts], startups)
    for old, new in (
        ("starts=[2]", "starts=[1]"),  # a box of other rows
        ("ends=[4], starts=[2]", "ends=[2], starts=[0]"),  # one box twice
        ("ends=[6], starts=[3]", "ends=[3], starts=[0]"),  # the other's columns
    ):
        assert any(old in t for t in texts), (old, texts[0])
        wrong = [Program.parse_from_string(t.replace(old, new)) if k == 1 else Program.parse_from_string(t) for k, t in enumerate(texts)]
        with pytest.raises(VerifyError):
            verify_ranks(ProgramPair(one, Program("startup")), wrong, startups)
    joined = re.compile(r"= concat\(\[(%\S+), (%\S+)\]\)")
    assert joined.search(texts[0])
    wrong = [Program.parse_from_string(joined.sub(r"= concat([\2, \1])", t)) for t in texts]
    with pytest.raises(VerifyError):
        verify_ranks(ProgramPair(one, Program("startup")), wrong, startups)


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
    "zero3": BOTH,  # whose parameters are cut along any axis
}


@cache
def one_device():
    """A model of integers, what is fetched of it, its feeds, and what one device gives."""
    model = integer_mlp()
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(24)]
    return model, fetch, feeds, *train_single(model, feeds, fetch)


def bit_equal(strategy, trainers):
    """The loss, every gradient and every parameter after a step are those of one device, bit for bit; and the proof finds so."""
    model, fetch, feeds, (one,), scope = one_device()
    (many,), state = train_ranks(model, strategy, trainers, feeds, fetch)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(np.array_equal(scope.get(p), state[p]) for p, _ in model.gradients)


PAIRS = {f"{s} {a}": (s, a) for s, names in STRATEGIES.items() for a in names}


@swept(2, pair=PAIRS, ranks=[3, 4])  # one rank sends nothing: test_parity.py has it for every strategy
def test_training_is_bit_equal_by_every_algorithm(pair, ranks):
    strategy, name = pair
    bit_equal(fx.strategies.get(strategy, algorithm=name), ranks)


@swept(2, strategy=list(STRATEGIES), hierarchical=[True, False, "auto"], cluster=[fx.Cluster(2, 3), fx.Cluster(3, 1)])
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


class Doubled(Algorithm):
    """Sends everything to rank 0 and back."""

    name = "doubled"
    gathers = True

    def all_reduce(self, n):
        up = (tuple(Transfer(k, 0, 0, 1, True) for k in range(1, n)),)
        return up + backwards(up)


@pytest.fixture
def own_algorithm():
    yield fx.transpiler.register
    ALGORITHMS.pop(Doubled.name, None)


def test_an_algorithm_takes_the_place_of_the_one_that_had_its_name(own_algorithm):
    class Chained(Doubled):
        def all_reduce(self, n):
            up = tuple((Transfer(k, k - 1, 0, 1, True),) for k in range(n - 1, 0, -1))
            return up + backwards(up)

    model = classifier()

    def hops():
        t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm="doubled"))
        t.transpile(program=model.main, startup_program=model.startup, trainers=4).verify()
        return {b for r in range(4) for b, _ in messages(t.get_trainer_program(r))}

    own_algorithm(Doubled())
    few = hops()
    own_algorithm(Chained())
    assert len(hops()) == 3 * len(few)
    own_algorithm(Doubled())
    assert hops() == few
    assert not able("doubled", "reduce", 3)


def test_what_is_no_algorithm_is_not_registered(own_algorithm):
    class Rival(Doubled):
        name = "ring"

    class Auto(Doubled):
        name = "auto"

    for wrong, said in ((Rival(), "own algorithms; give .* another name"), (Auto(), 'not "auto"'), (Doubled, "an instance of a subclass")):
        with pytest.raises(fx.TranspileError, match=said):
            own_algorithm(wrong)
        if isinstance(wrong, Algorithm):
            with pytest.raises(fx.TranspileError, match=said):
                fx.strategies.data_parallel(algorithm=wrong)
