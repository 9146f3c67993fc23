"""Algorithms as data: what they compute, how many rounds they take, and what each rank sends."""

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidx.transpiler.algorithms import ALGORITHMS, Refused, Shifted, Transfer, algorithm, count_messages, parts, schedule
from fluidx.transpiler.algorithms.cost import cheapest, seconds
from fluidx.transpiler.cluster import Links
from tests.each import each

ALPHA, BETA = Links().between

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
BOTH = [a for a in ALGORITHMS if a != "double_binary_tree"]
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
every_size = pytest.mark.parametrize("n", SIZES)


def carried_out(rounds, marks, held):
    """What the ranks have behind the rounds: all sends of a round see what was there before it."""
    held = np.array(held)
    for r in rounds:
        before = held.copy()
        kept = set()
        for t in r:
            assert t.source != t.target
            a, b = marks[t.start], marks[t.stop]
            if t.add:
                held[t.target, a:b] += before[t.source, a:b]
            else:
                held[t.target, a:b] = before[t.source, a:b]
                assert not kept & {(t.target, k) for k in range(a, b)}, "two ranks write one element"
                kept |= {(t.target, k) for k in range(a, b)}
    return held


def terms(n, size):
    return np.random.default_rng(n).integers(-9, 10, (n, size)).astype(float)


@each("n", SIZES)
@each("name", ALGORITHMS)
@each("size", [0, 1, 3, 29])
def test_an_all_reduce_gives_every_rank_the_sum(name, n, size):
    x = terms(n, size)
    got = carried_out(schedule(name, "all_reduce", n), algorithm(name).cut(n, size), x)
    assert (got == x.sum(0)).all()


def cuts(n):
    """All blocks alike, uneven ones, most of them empty, and all with one owner."""
    yield [3 * k for k in range(n + 1)]
    yield [k * k for k in range(n + 1)]
    yield [k // 2 for k in range(n + 1)]
    for root in {0, n // 2, n - 1}:
        yield [0] * (root + 1) + [5] * (n - root)


@each("n", SIZES)
@each("name", BOTH)
def test_a_reduce_brings_each_block_to_its_owner_and_spread_from_there_to_all(name, n):
    for marks in cuts(n):
        x = terms(n, marks[-1])
        sums = carried_out(schedule(name, "reduce", n), marks, x)
        for k, (a, b) in enumerate(zip(marks, marks[1:], strict=False)):
            assert (sums[k, a:b] == x.sum(0)[a:b]).all()
        own = np.full_like(x, np.nan)  # what a rank does not own must not reach anybody
        for k, (a, b) in enumerate(zip(marks, marks[1:], strict=False)):
            own[k, a:b] = x[0, a:b]
        assert (carried_out(schedule(name, "spread", n), marks, own) == x[0]).all()


many = st.integers(1, 4)


@given(st.sampled_from(BOTH), st.sampled_from(BOTH), many, many, st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_two_levels_compute_what_one_does(inside, between, hosts, each, sizes):
    n = hosts * each
    marks = [0, *np.cumsum(sizes[:n]).tolist()]
    x = terms(n, marks[-1])
    rounds = [schedule(f"{inside}/{between}", c, n, hosts) for c in ("reduce", "spread", "all_reduce")]
    sums = carried_out(rounds[0], marks, x)
    own = np.full_like(x, np.nan)
    for k, (a, b) in enumerate(zip(marks, marks[1:], strict=False)):
        assert (sums[k, a:b] == x.sum(0)[a:b]).all()
        own[k, a:b] = x[0, a:b]
    assert (carried_out(rounds[1], marks, own) == x[0]).all()
    assert (carried_out(rounds[2], marks, x) == x.sum(0)).all()


# -- closed forms -------------------------------------------------------------------------------------------------------------------------


def sent(rounds, marks, n):
    """Elements that each rank sends."""
    out = [0] * n
    for r in rounds:
        for t in r:
            out[t.source] += marks[t.stop] - marks[t.start]
    return out


def power(n):
    return n & (n - 1) == 0


# n -> (rounds, elements that the busiest rank sends of a value of `each` per rank), of an all_reduce. Sources: Thakur et al. 2005, table 1;
# the star and the tree by counting: the root, and the rank that is a parent in each round
FORMS = {
    "star": lambda n, size: (2, (n - 1) * size),
    "direct": lambda n, size: (2, 2 * (n - 1) * size // n),
    "tree": lambda n, size: (2 * ceil(log2(n)), ceil(log2(n)) * size),
    "ring": lambda n, size: (2 * (n - 1), 2 * (n - 1) * size // n),
    "recursive_doubling": lambda n, size: (int(log2(n)), int(log2(n)) * size),
    "halving_doubling": lambda n, size: (2 * int(log2(n)), 2 * (n - 1) * size // n),
}


@pytest.mark.parametrize("name", FORMS)
def test_rounds_and_bytes_of_an_all_reduce_are_the_closed_form(name):
    for n in SIZES[1:]:
        if not power(n) and name in ("recursive_doubling", "halving_doubling"):
            continue  # below
        size = 12 * n
        rounds = schedule(name, "all_reduce", n)
        each = sent(rounds, algorithm(name).cut(n, size), n)
        assert (len(rounds), max(each)) == FORMS[name](n, size), n
        if name in ("direct", "ring", "recursive_doubling", "halving_doubling"):
            assert set(each) == {max(each)}  # all alike


@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling"])
def test_ranks_beyond_a_power_of_two_are_folded_for_two_rounds_more(name):
    for n in (3, 5, 6, 7, 9, 12):
        p = 2 ** int(log2(n))
        reduce = len(schedule(name, "reduce", p))
        assert len(schedule(name, "all_reduce", n)) == len(schedule(name, "all_reduce", p)) + (2 if name[0] == "r" else 4)
        assert len(schedule(name, "reduce", n)) == reduce + 2


@pytest.mark.parametrize("name", ["direct", "star", "ring"])
def test_a_reduce_scatter_or_all_gather_sends_what_it_must(name):
    for n in SIZES[1:]:
        marks = [7 * k for k in range(n + 1)]
        for carries in ("reduce", "spread"):
            rounds = schedule(name, carries, n)
            assert sent(rounds, marks, n) == [7 * (n - 1)] * n
            assert len(rounds) == (n - 1 if name == "ring" else 1)


def test_double_binary_trees_are_as_deep_as_the_logarithm_and_no_rank_sends_more_than_twice_the_value():
    for n in SIZES[1:]:
        rounds = schedule("double_binary_tree", "all_reduce", n)
        size = 12 * n
        assert len(rounds) <= 2 * ceil(log2(n))
        # a rank sends half of the value up each tree and down to at most two children in one of them and one in the other
        assert max(sent(rounds, algorithm("double_binary_tree").cut(n, size), n)) <= 2.5 * size
    with pytest.raises(Refused, match="double_binary_tree has only an all_reduce"):
        schedule("double_binary_tree", "spread", 4)


def test_two_levels_send_a_share_of_the_value_between_hosts():
    hosts, each = 4, 8
    n = hosts * each
    marks = [3 * k for k in range(n + 1)]
    rounds = schedule("direct/ring", "reduce", n, hosts)
    across = [0] * n
    for r in rounds:
        for t in r:
            if t.source // each != t.target // each:
                assert t.source % each == t.target % each  # on its rail
                across[t.source] += marks[t.stop] - marks[t.start]
    assert across == [3 * (hosts - 1)] * n  # of 1/8 of the value, all but its own part


# -- the choice ---------------------------------------------------------------------------------------------------------------------------


def test_the_model_is_alpha_for_a_message_and_beta_for_a_byte():
    for n in (2, 4, 8):
        ring = 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * 10**6 * BETA
        assert seconds("ring", "all_reduce", n, 10**6) == pytest.approx(ring, rel=1e-6)  # the blocks of the model are whole numbers
        assert seconds("tree", "reduce", n, 10**6, rooted=True) == pytest.approx(log2(n) * (ALPHA + 10**6 * BETA), rel=1e-6)
        assert seconds("star", "all_reduce", n, 10**6) == pytest.approx(2 * (n - 1) * (ALPHA + 10**6 * BETA), rel=1e-6)


def test_small_values_take_few_rounds_and_large_ones_send_few_bytes():
    for n in (2, 3, 4, 5, 8, 16):
        assert cheapest("all_reduce", n, 64) == "recursive_doubling"
        # two ranks exchange all they have in one round, which is the least there is
        assert n == 2 or cheapest("all_reduce", n, 10**8) in ("halving_doubling", "ring")
    assert cheapest("all_reduce", 6, 10**8) == "ring"  # folding two ranks would send the value twice more


@pytest.mark.parametrize("n", [1, 2, 5])
def test_round_the_ring_block_k_visits_the_ranks_behind_rank_k_and_ends_there(n):
    ring = algorithm("ring")
    up = tuple(tuple(Transfer((k + h) % n, (k + h + 1) % n, k, k + 1, True) for k in range(n)) for h in range(1, n))
    assert tuple(map(tuple, ring.reduce(n))) == up
    back = tuple(tuple(Transfer((k + h) % n, (k + h + 1) % n, k, k + 1, False) for k in range(n)) for h in range(n - 1))
    assert tuple(map(tuple, ring.spread(n))) == back


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling"])
def test_a_rank_does_the_transfers_of_all_that_it_sends_or_receives(name):
    n, filled = 5, (0, 3)
    rounds = schedule(name, "all_reduce", n)
    for rank in range(n):
        found = {p.round: p for p in parts(name, "all_reduce", n, 1, filled, rank)}
        for k, r in enumerate(rounds):
            mine = [t for t in r if any(b in filled for b in range(t.start, t.stop))]
            gives, takes = ([t for t in mine if t[side] == rank] for side in (0, 1))
            assert (found[k].gives, found[k].takes) == (gives, takes) if gives or takes else k not in found


def test_among_many_ranks_rounds_of_the_ring_are_small_and_a_rank_finds_its_transfers():
    assert all(isinstance(r, Shifted) for r in schedule("ring", "all_reduce", 1000))
    # block 7 starts at rank 8, which sends it first; behind the sums it comes from rank 7 and goes on
    mine = parts("ring", "all_reduce", 1000, 1, (7,), 8)
    assert [(p.round, len(p.gives), len(p.takes)) for p in mine] == [(0, 1, 0), (999, 0, 1), (1000, 1, 0)]


@each("name", [*ALGORITHMS, "direct/ring", "tree/star"])
@each("n", (1, 2, 4, 6, 8))
def test_messages_are_counted_as_one_transfer_after_the_other(name, n):
    rng = np.random.default_rng(n)
    hosts = 2 if n % 2 == 0 else 1
    for method in ("reduce", "spread", "all_reduce", "exchange"):
        try:
            transfers = [t for r in schedule(name, method, n, hosts) for t in r]
        except Refused:
            continue
        blocks = n * n if method == "exchange" else n
        for _ in range(5):
            filled = tuple(map(int, np.flatnonzero(rng.integers(0, 2, blocks))))
            messages = lambda t: [0] * (1 + (t.start + 2 * t.stop) % 3)  # noqa: E731
            sent = sum(len(messages(t)) for t in transfers if {*filled} & {*range(t.start, t.stop)})
            assert count_messages(name, method, n, hosts, filled, messages) == sent
