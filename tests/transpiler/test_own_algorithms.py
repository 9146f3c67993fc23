"""Algorithms of a user's: the symbolic check that names the algorithm, the number of ranks and the fault."""

import pytest

import fluidx as fx
from fluidx.testing.models import classifier
from fluidx.transpiler.algorithms import ALGORITHMS, Algorithm, Refused, Transfer, backwards, check_rounds


@pytest.fixture
def register():
    before = dict(ALGORITHMS)
    yield fx.transpiler.register
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


class TwoPhaseStar(Algorithm):
    """Every rank adds up its own block, then sends it to all."""

    name = "two_phase_star"

    def reduce(self, n):
        return (tuple(Transfer(k, j, j, j + 1, True) for j in range(n) for k in range(n) if k != j),) if n > 1 else ()


def changed(collective, rounds):
    """A class that makes one collective among three ranks of these rounds."""

    def method(self, n):
        if n != 3:
            raise Refused("three ranks alone")
        return rounds

    return type("Changed", (Algorithm,), {"name": "changed", collective: method})()


UP = Transfer(1, 0, 0, 1, True), Transfer(2, 0, 0, 1, True)
BACK = backwards((UP,))[0]
SUMS = (*UP, Transfer(0, 1, 1, 2, True), Transfer(2, 1, 1, 2, True), Transfer(0, 2, 2, 3, True), Transfer(1, 2, 2, 3, True))


def test_right_rounds_pass(register):
    register(TwoPhaseStar())
    for carries in ("reduce", "spread", "all_reduce", "exchange"):
        assert check_rounds(TwoPhaseStar(), carries, 33)


@pytest.mark.parametrize(
    "collective, rounds, said",
    [
        ("reduce", (SUMS[:-1],), "at the end, rank 2 has of block 2 the terms of ranks 0, 2; rank 1's is missing"),
        ("reduce", (SUMS, UP[:1]), "round 2, block 0 from rank 1 to rank 0: block 0 gets the term of rank 1 a second time"),
        ("reduce", (SUMS, (Transfer(1, 0, 0, 1, False),)), "at the end, rank 0 has of block 0 the term of rank 1; rank 0's is missing"),
        ("spread", ((Transfer(0, 1, 0, 1, False), Transfer(0, 2, 0, 1, False)),), "rank 0 has of block 1 nothing; rank 1's is missing"),
        ("spread", ((*BACK, Transfer(0, 1, 1, 2, False)),), "round 1, block 1 from rank 0 to rank 1: rank 0 does not have block 1"),
        ("spread", ((Transfer(0, 1, 0, 1, True),),), "round 1, block 0 from rank 0 to rank 1: rank 1 has nothing of block 0 to add it to"),
        ("all_reduce", ((Transfer(0, 1, 0, 3, False),) * 2,), "rank 1: rank 0 sends it the same block in this round"),
        ("exchange", ((Transfer(0, 1, 1, 2, False),),), "at the end, rank 0 has of block 3 nothing; rank 1's is missing"),
        ("reduce", ((Transfer(0, 3, 0, 1, True),),), "round 1, block 0 from rank 0 to rank 3: ranks are 0 to 2"),
        ("reduce", ((Transfer(0, 0, 0, 1, True),),), "round 1, block 0 from rank 0 to rank 0: a rank sends to other ranks"),
        ("reduce", ((Transfer(0, 1, 2, 4, True),),), "rank 1: blocks are 0 to 2, and a transfer has one or more"),
        ("reduce", (("send",),), "round 1: a transfer is (source, target, start, stop, add), found 'send'"),
        ("reduce", None, "rounds are a tuple of tuples of Transfer, got None"),
    ],
)
def test_wrong_rounds_are_refused_with_the_rank_and_the_block(register, collective, rounds, said):
    with pytest.raises(fx.TranspileError) as e:
        register(changed(collective, rounds))
    assert f"algorithm changed, {collective} among 3 ranks: " in str(e.value) and said in str(e.value)
    assert "changed" not in ALGORITHMS


def test_a_method_that_ends_in_an_error_and_an_algorithm_that_makes_nothing_are_refused(register):
    class Broken(Algorithm):
        name = "broken"

        def reduce(self, n):
            return (tuple(Transfer(k, [0][k], 0, 1, True) for k in range(n)),)

    class Nothing(Algorithm):
        name = "nothing"

    with pytest.raises(fx.TranspileError, match="algorithm broken, reduce among 1 rank: .*rank 0 to rank 0: a rank sends to other ranks"):
        register(Broken())
    with pytest.raises(fx.TranspileError, match="algorithm nothing makes no collective: nothing does not define reduce"):
        register(Nothing())


def test_a_cut_that_is_no_cut_is_refused(register):
    class Cut(TwoPhaseStar):
        name = "cut"

        def cut(self, n, size):
            return [0, size]

    with pytest.raises(fx.TranspileError, match=r"algorithm cut, all_reduce among 2 ranks: cut\(2, 1048576\) must be 3 rising ints"):
        register(Cut())


def test_rounds_that_are_wrong_among_more_than_nine_ranks_are_refused_at_use(register):
    class Late(TwoPhaseStar):
        name = "late"

        def reduce(self, n):
            (up,) = super().reduce(n) or ((),)
            return (up[:-1],) if n > 9 else (up,)

    register(Late())
    model = classifier()
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm="late"))
    with pytest.raises(fx.TranspileError, match="algorithm late, all_reduce among 10 ranks: .*rank 0 has of block 9 .*; rank 8's"):
        t.transpile(program=model.main, startup_program=model.startup, trainers=10)


def test_what_only_goes_back_is_the_same_way(register):
    up = TwoPhaseStar().reduce(3)
    assert backwards(up)[0][0] == Transfer(0, 1, 0, 1, False)


@pytest.mark.parametrize(
    "rounds, said",
    [
        ([SUMS], "rounds are a tuple of tuples of Transfer, got [("),
        ((tuple(tuple(t) for t in SUMS),), "rounds are a tuple of tuples of Transfer, got (1, 0, 0, 1, True) in a round"),
    ],
)
def test_rounds_of_other_types_are_named(register, rounds, said):
    with pytest.raises(fx.TranspileError) as e:
        register(changed("reduce", rounds))
    assert f"algorithm changed, reduce among 3 ranks: {said}" in str(e.value)


def cutting(cut):
    """A right algorithm with another cut."""
    return type("Cutting", (TwoPhaseStar,), {"name": "cutting", "cut": lambda self, n, size: cut(n, size)})()


@pytest.mark.parametrize("cut", [lambda n, size: [size * k / n for k in range(n + 1)], lambda n, size: None, lambda n, size: 1 // 0])
def test_a_cut_that_gives_no_ints_is_refused_when_it_is_registered(register, cut):
    with pytest.raises(fx.TranspileError, match=r"algorithm cutting, all_reduce among 1 rank: cut\(1, 1048576\)"):
        register(cutting(cut))


@pytest.mark.parametrize(
    "wrong", [lambda n, size: [0, size], lambda n, size: None, lambda n, size: 1 // 0, lambda n, size: [0, -1, size, size]]
)
def test_a_cut_that_is_wrong_for_one_size_is_refused_with_the_size(register, wrong):
    m = classifier(fx.optimizer.SGD(0.1))
    own = cutting(lambda n, size: [0] * n + [size] if size == 2**20 else wrong(n, size))
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm=own))
    t.transpile(program=m.main, startup_program=m.startup, trainers=3)
    with pytest.raises(fx.TranspileError, match=r"algorithm cutting, all_reduce among 3 ranks: cut\(3, \d+\)"):
        t.get_trainer_program(0)
