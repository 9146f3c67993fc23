"""prove_rounds: rounds that drop, duplicate or misroute a block are refused, with the transfer or the block."""

import pytest

from fluidx.transpiler.algorithms import ALGORITHMS, Refused, Transfer, schedule
from fluidx.verify.recipe import prove_rounds

COLLECTIVES = ("reduce", "spread", "all_reduce", "exchange", "adaptive")


def filled(name, collective, n):
    marks = ALGORITHMS[name].cut(n, 10 * n) if collective == "all_reduce" else range(n + 1)
    return None if collective in ("exchange", "adaptive") else [k for k in range(n) if marks[k] < marks[k + 1]]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_built_in_algorithms_are_proved_for_one_to_nine_ranks(name, collective):
    for n in range(1, 10):
        try:
            rounds = schedule(name, collective, n)
        except Refused:
            continue
        assert prove_rounds(collective, n, rounds, filled(name, collective, n)) is None


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
