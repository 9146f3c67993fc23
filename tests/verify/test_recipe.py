"""prove_rounds: rounds that drop, duplicate or misroute a block are refused, with the transfer or the block."""

from collections import Counter
from random import Random

import pytest

from fluidx.transpiler.algorithms import ALGORITHMS, Refused, Shifted, Transfer, algorithm, schedule
from fluidx.transpiler.algorithms.two_level import InsideHosts
from fluidx.verify.recipe import prove_rounds, two_level_rounds_hold

COLLECTIVES = ("reduce", "spread", "all_reduce", "exchange", "adaptive")


def filled(name, collective, n):
    marks = ALGORITHMS[name].cut(n, 10 * n) if collective == "all_reduce" else range(n + 1)
    return None if collective in ("exchange", "adaptive") else [k for k in range(n) if marks[k] < marks[k + 1]]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_built_in_algorithms_are_proved_for_one_to_nine_ranks(name, collective):
    proved = 0
    for n in range(1, 10):
        try:
            rounds = schedule(name, collective, n)
        except Refused:
            continue
        assert prove_rounds(collective, n, rounds, filled(name, collective, n)) is None
        proved += 1
    if collective == "adaptive":  # in pairs, by powers of two: of 1, 2, 4 and 8 ranks
        assert proved == (4 if name in ("recursive_doubling", "halving_doubling") else 0)
    else:  # two trees carry the two halves of a sum to all
        assert proved == (0 if name == "double_binary_tree" and collective in ("reduce", "spread") else 9)


@pytest.mark.parametrize("collective", ["reduce", "spread", "all_reduce"])
def test_two_level_algorithms_are_proved(collective):
    assert prove_rounds(collective, 6, schedule("direct/ring", collective, 6, hosts=2)) is None


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "direct"])
@pytest.mark.parametrize("collective", ["reduce", "spread", "all_reduce", "exchange", "adaptive"])
def test_a_dropped_transfer_is_refused(name, collective):
    try:
        rounds = [list(r) for r in schedule(name, collective, 4)]
    except Refused:
        return
    for k, r in enumerate(rounds):
        for t in r:
            less = [[o for o in s if o is not t or j != k] for j, s in enumerate(rounds)]
            assert prove_rounds(collective, 4, less, filled(name, collective, 4)) is not None, t


def right(n, rounds):
    """Does every rank end with the sum of all ranks, on numbers whose sums tell which terms are in them?"""
    have = [[10.0**k] * n for k in range(n)]
    for r in rounds:
        before = [[*mine] for mine in have]
        for t in r:
            for b in range(t.start, t.stop):
                have[t.target][b] = have[t.target][b] * t.add + before[t.source][b]
    return all(v == sum(10.0**k for k in range(n)) for mine in have for v in mine)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "direct"])
def test_a_transfer_to_another_rank_is_refused_where_numbers_become_wrong(name):
    rounds = schedule(name, "all_reduce", 4)
    assert right(4, rounds)
    for k, r in enumerate(rounds):
        for t in r:
            for other in {0, 1, 2, 3} - {t.source, t.target}:
                wrong = [[t._replace(target=other) if o is t and j == k else o for o in s] for j, s in enumerate(rounds)]
                assert (prove_rounds("all_reduce", 4, wrong) is None) == right(4, wrong), t


def test_a_second_term_of_a_rank_is_refused():
    rounds = [*schedule("star", "reduce", 3), [Transfer(1, 0, 0, 1, True)]]
    assert str(prove_rounds("reduce", 3, rounds)) == "round 2, block 0 from rank 1 to rank 0: block 0 gets the term of rank 1 a second time"


def test_a_value_in_place_of_a_sum_is_refused():
    rounds = [[Transfer(1, 0, 0, 1, False), Transfer(0, 1, 1, 2, True)]]
    assert str(prove_rounds("reduce", 2, rounds)) == "at the end, rank 0 has of block 0 the term of rank 1; rank 0's is missing"


def test_a_block_that_a_rank_does_not_have_is_refused():
    assert str(prove_rounds("spread", 3, [[Transfer(0, 1, 1, 2, False)]])) == (
        "round 1, block 1 from rank 0 to rank 1: rank 0 does not have block 1"
    )


def test_two_transfers_that_overwrite_each_other_in_a_round_are_refused():
    rounds = [[Transfer(0, 1, 0, 1, False), Transfer(2, 1, 0, 1, False)]]
    assert "one is lost" in str(prove_rounds("all_reduce", 3, rounds))


def test_a_round_sends_what_was_there_before_it():
    chain = [Transfer(0, 1, 0, 1, False), Transfer(1, 2, 0, 1, False)]
    assert "rank 1 does not have block 0" in str(prove_rounds("spread", 3, [chain], [0]))
    assert prove_rounds("spread", 3, [[t] for t in chain], [0]) is None


@pytest.mark.parametrize(("transfer", "said"), [
    ((0, 4, 0, 1, True), "ranks are 0 to 2"),
    ((0, 0, 0, 1, True), "a rank sends to other ranks"),
    ((0, 1, 2, 2, True), "a transfer has one or more"),
    ((0, 1, 0, 4, True), "blocks are 0 to 2"),
    ((0, 1, 0), "a transfer is (source, target, start, stop, add)"),
    ((0, 1, 0, 1.5, True), "four ints and a bool"),
])  # fmt: skip
def test_a_malformed_transfer_is_refused(transfer, said):
    assert said in str(prove_rounds("all_reduce", 3, [[transfer]]))


# -- two levels ---------------------------------------------------------------------------------------------------------------------------

METHODS = ("reduce", "spread", "all_reduce")


def levels_of(rounds):
    return [(isinstance(r, InsideHosts), list(r.first)) for r in rounds]


def written_out(levels, hosts, g):
    """The transfers of all ranks, by what a round inside hosts and between them means."""
    return [
        [(h * g + s, h * g + d, j * g + a, j * g + b, add) for h in range(hosts) for j in range(hosts) for s, d, a, b, add in r]
        if inside
        else [(s * g + k, d * g + k, j * g + k, j * g + k + 1, add) for k in range(g) for s, d, a, b, add in r for j in range(a, b)]
        for inside, r in levels
    ]


@pytest.mark.parametrize("hosts, g", [(2, 2), (3, 2), (2, 4), (4, 1), (3, 5)])
@pytest.mark.parametrize(
    "name", ["direct/ring", "ring/direct", "tree/tree", "star/halving_doubling", "double_binary_tree/recursive_doubling"]
)
def test_two_levels_hold_by_their_parts_as_they_do_written_out(name, hosts, g):
    of, n = algorithm(name, hosts), hosts * g
    for method in METHODS:
        try:
            rounds = getattr(of, method)(n)
        except Refused:
            continue
        levels = levels_of(rounds)
        out = written_out(levels, hosts, g)
        assert [sorted(r) for r in out] == [sorted(r) for r in rounds]
        assert [len(r) for r in rounds] == [len(r) for r in out]
        assert prove_rounds(method, n, out) is None and two_level_rounds_hold(method, hosts, g, levels)
        assert two_level_rounds_hold(method, hosts, g, [(isinstance(r, InsideHosts), r.first) for r in rounds])
        for r in rounds:
            assert r.times_sent() == Counter((t.start, t.stop) for t in r)
            for rank in range(n):
                assert r.of_rank(rank) == [(k, t) for k, t in enumerate(r) if rank in (t.source, t.target)]


def changed(levels, rng, hosts, g):
    """Levels with one mistake: a round is lost, repeated, moved or of the other level, or a transfer is lost, repeated or another one."""
    levels = [(inside, list(r)) for inside, r in levels]
    k = rng.randrange(len(levels))
    inside, r = levels[k]
    n = g if inside else hosts
    what = rng.randrange(8)
    if what == 0:
        del levels[k]
    elif what == 1:
        levels.insert(rng.randrange(len(levels)), levels[k])
    elif what == 2:
        levels.insert(rng.randrange(len(levels)), levels.pop(k))
    elif what == 3:
        levels[k] = not inside, r
    elif what == 4:
        del r[rng.randrange(len(r))]
    elif what == 5:
        levels[rng.randrange(len(levels))][1].append(rng.choice(r))
    else:
        s, d, a, b, add = r[(at := rng.randrange(len(r)))]
        other = rng.randrange(n)
        r[at] = rng.choice([(s, d, other, other + 1, add), (s, d, a, b, not add), (other, d, a, b, add), (s, other, a, b, add)])
    return levels


@pytest.mark.parametrize("name", ["direct/ring", "ring/halving_doubling", "tree/direct"])
@pytest.mark.parametrize("method", METHODS)
def test_two_levels_with_a_mistake_are_refused_where_the_rounds_written_out_are(name, method):
    wrong = 0
    rng = Random(f"{name} {method}")
    for hosts, g in ((2, 2), (4, 2), (2, 3)) if "halving" not in name else ((2, 2), (4, 2), (2, 4)):
        levels = levels_of(getattr(algorithm(name, hosts), method)(hosts * g))
        for _ in range(150):
            mutant = changed(levels, rng, hosts, g)
            if prove_rounds(method, hosts * g, written_out(mutant, hosts, g)) is not None:
                wrong += 1
                assert not two_level_rounds_hold(method, hosts, g, mutant), mutant
    assert wrong > 200


@pytest.mark.parametrize("method", METHODS)
def test_shifted_rounds_of_two_levels_are_refused_where_their_transfers_are(method):
    for hosts, g in ((3, 2), (2, 4)):
        right = [(isinstance(r, InsideHosts), r.first) for r in getattr(algorithm("ring/direct", hosts), method)(hosts * g)]
        for k, (inside, r) in enumerate(right):
            for other in (Shifted(r.n, *r.firsts[1:]), Shifted(r.n + 1, *r.firsts), Shifted(r.n, *r.firsts, r.firsts[0])):
                wrong = [*right[:k], (inside, other), *right[k + 1 :]]
                plain = [(inside, list(r)) for inside, r in wrong]
                assert two_level_rounds_hold(method, hosts, g, wrong) == two_level_rounds_hold(method, hosts, g, plain)


def test_other_collectives_have_no_two_levels():
    assert not two_level_rounds_hold("exchange", 1, 1, []) and not two_level_rounds_hold("reduce", 2, 1, [])
