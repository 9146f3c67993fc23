"""A rank's program follows from the program for all ranks, or is refused: what is accepted, the proof of all rank programs accepts too."""

import random

import pytest

import fluidx as fx
from fluidx.transpiler.algorithms import ALGORITHMS, Algorithm, Shifted, Transfer, check_rounds_of, register, schedule
from fluidx.transpiler.specialize import Specializer
from fluidx.verify import verify_common, verify_ranks
from fluidx.verify.rank_program import check_rank_program
from fluidx.verify.recipe import prove_rounds, shifted_rounds_hold
from fluidx.verify.refusal import Refusal
from tests.sweep import examples

S = fx.strategies
NAMES = ("ring", "tree", "double_binary_tree", "halving_doubling", "recursive_doubling", "star", "direct")
CASES = {
    "data_parallel": (S.data_parallel, 4),
    "reduce_broadcast": (S.reduce_broadcast, 3),
    "ring_optimizer": (S.ring_optimizer, 4),
    "ring_optimizer in chunks": (lambda: S.ring_optimizer(chunk_mb=0.0001), 3),
    "zero1 ring": (lambda: S.zero1(algorithm="ring"), 3),
    "fsdp ring": (lambda: S.fsdp(algorithm="ring"), 4),
    "zero2 halving": (lambda: S.zero2(algorithm="halving_doubling"), 4),
    "two hosts": (S.data_parallel, fx.Cluster(2, 2)),
    "rails": (lambda: S.rails(slice_mb=0.0002, staging_mb=0.0004), fx.Cluster(2, 2)),
    "1f1b": (lambda: S.pipeline(2), fx.Mesh(pp=2, dp=2)),
    "gpipe zero1": (lambda: S.pipeline(3, "gpipe", S.zero1()), fx.Mesh(pp=3, dp=2)),
    **{f"data_parallel {a}": (lambda a=a: S.data_parallel(algorithm=a), 5) for a in NAMES},
}
every_case = pytest.mark.parametrize("case", CASES)


def transpiled(case, ranks=None):
    strategy, world = CASES[case]
    stages = world.axes["pp"] if isinstance(world, fx.Mesh) else 0
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, 4], "float32")
        for k in range(stages or 1):
            with fx.device_guard(f"stage:{k}" if stages else None):
                h = fx.layers.fc(h, 6, act="relu")
        with fx.device_guard(f"stage:{stages - 1}" if stages else None):
            loss = fx.layers.mean(fx.layers.fc(h, 3))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    return fx.DistributeTranspiler(strategy()).transpile(program=main, startup_program=startup, trainers=ranks or world)


def drop(ops, rng):
    del ops[rng.randrange(len(ops))]


def twice(ops, rng):
    k = rng.randrange(len(ops))
    ops.insert(rng.randrange(k, len(ops)) + 1, ops[k])


def exchange(ops, rng):
    k = rng.randrange(len(ops) - 1)
    ops[k], ops[k + 1] = ops[k + 1], ops[k]


def move(ops, rng):
    op = ops.pop(rng.randrange(len(ops)))
    ops.insert(rng.randrange(len(ops) + 1), op)


def other_number(ops, rng):
    k = rng.choice([k for k, op in enumerate(ops) if any(type(v) is int for v in op.attrs.values())])
    name = rng.choice([n for n, v in ops[k].attrs.items() if type(v) is int])
    ops[k] = ops[k].replace(attrs={**ops[k].attrs, name: ops[k].attrs[name] + rng.choice([-1, 1])})


def other_text(ops, rng):
    k = rng.choice([k for k, op in enumerate(ops) if op.attrs.get("batch")] or [None])
    if k is None:
        return drop(ops, rng)
    label = rng.choice(["", "another", rng.choice(ops).attrs.get("batch", "")])
    ops[k] = ops[k].replace(attrs={**ops[k].attrs, "batch": label})


def other_operand(ops, rng):
    k = rng.choice([k for k, op in enumerate(ops) if op.input_arg_names])
    names = [n for op in ops[:k] for n in op.output_arg_names] or [*ops[k].input_arg_names]
    ops[k] = ops[k].renamed({rng.choice(ops[k].input_arg_names): rng.choice(names)})


def exchanged_operands(ops, rng):
    many = [k for k, op in enumerate(ops) if len(op.input_arg_names) > 1]
    if not many:
        return drop(ops, rng)
    k = rng.choice(many)
    a, b = rng.sample(ops[k].input_arg_names, 2)
    ops[k] = ops[k].renamed({a: b, b: a})


MUTATIONS = (drop, twice, exchange, move, other_number, other_text, other_operand, exchanged_operands)


def follows(special, program, rank):
    try:
        check_rank_program(special.program, program, rank, special.recipe)
    except Refusal:
        return False
    return True


def proved(prove, *args):
    try:
        prove(*args)
    except fx.VerifyError:
        return False
    return True


@every_case
@pytest.mark.parametrize("ranks", [None, 2, 7])
def test_the_programs_that_specialize_makes_follow(case, ranks):
    t = transpiled(case, ranks if isinstance(CASES[case][1], int) else None)
    for special in t._special:
        assert special.is_common
        assert all(follows(special, special.rank_program(r), r) for r in range(t.world_size))
    verify_common(t.source, t.pair, t.world_size)


@every_case
def test_the_program_of_another_rank_does_not_follow(case):
    t = transpiled(case)
    special = t._special[0]
    assert not follows(special, special.rank_program(1), 0)
    other = special.rank_program(1)
    other.rank = 0
    same = other.ops == special.rank_program(0).ops
    assert follows(special, other, 0) == same


@every_case
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_what_is_accepted_of_a_broken_rank_program_the_proof_of_all_accepts(case, mutation):
    t = transpiled(case)
    n, refused = t.world_size, 0
    mains, startups = ([special.rank_program(r) for r in range(n)] for special in t._special)
    for seed in range(6):
        rng = random.Random(f"{case} {mutation.__name__} {seed}")
        rank, k = rng.randrange(n), rng.random() < 0.2
        programs = [*(startups if k else mains)]
        broken = programs[rank] = t._special[k].rank_program(rank)
        before = [*broken.global_block().oplist]
        mutation(broken.global_block().oplist, rng)
        if broken.global_block().oplist == before:
            continue
        if not follows(t._special[k], broken, rank):
            refused += 1
            continue
        assert proved(verify_ranks, t.source, mains if k else programs, programs if k else startups), (seed, rank)
    assert refused


@every_case
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_what_is_proved_of_a_broken_program_for_all_ranks_the_proof_of_its_rank_programs_accepts(case, mutation):
    for seed in range(examples(2, 8)):
        t = transpiled(case)
        rng = random.Random(f"{mutation.__name__} {case} {seed}")
        k = rng.random() < 0.2
        mutation((t.main, t.startup)[k].global_block().oplist, rng)
        try:
            specials = [Specializer(p) for p in (t.main, t.startup)]
            mains, startups = ([special.rank_program(r) for r in range(t.world_size)] for special in specials)
            common = all(special.is_common for special in specials)
        except Exception:  # no program for all ranks any more
            continue
        if common and proved(verify_common, t.source, t.pair, t.world_size):
            assert proved(verify_ranks, t.source, mains, startups), seed


def test_a_wrong_rank_program_among_a_thousand_is_refused_when_it_is_made():
    t = transpiled("data_parallel ring", 1000)
    t.verify()
    write = Specializer.rank_program

    def broken(self, rank):
        program = write(self, rank)
        if rank == 617 and program.name == "mlp":
            drop(program.global_block().oplist, random.Random(0))
        return program

    Specializer.rank_program = broken
    try:
        assert t.get_trainer_program(616).ops
        with pytest.raises(fx.VerifyError, match="does not follow from the program for all ranks"):
            t.get_trainer_program(617)
    finally:
        Specializer.rank_program = write


def test_a_wrong_rank_program_is_refused_by_the_proof_of_every_rank():
    t = transpiled("data_parallel ring", 12)
    t.verify()
    drop(t.get_trainer_program(5).global_block().oplist, random.Random(0))
    for every_rank in (True, False):
        with pytest.raises(fx.VerifyError):
            t.verify(every_rank=every_rank)


@pytest.mark.parametrize("strategy", ["ring_optimizer", "reduce_broadcast", "data_parallel ring", "fsdp ring", "two hosts"])
def test_a_thousand_ranks_are_proved_without_their_programs(strategy):
    t = transpiled(strategy, fx.Cluster(250, 4) if strategy == "two hosts" else 1000)
    report = t.verify()
    assert not t._ranks
    assert t.get_trainer_program(999).ops and t.get_trainer_program(1).ops and t.verify() is report


@pytest.mark.parametrize("name", ["ring", "direct"])
@pytest.mark.parametrize("collective", ["reduce", "spread", "all_reduce"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_shifted_rounds_are_proved_as_rounds_written_out(name, collective, n):
    rng, right = random.Random(n), [[*r.firsts] for r in schedule(name, collective, n)]
    assert shifted_rounds_hold(collective, n, right)
    for _ in range(200):
        firsts = [[*r] for r in right]
        r = rng.choice(firsts)
        k = rng.randrange(len(r))
        source, target, block, _, add = r[k]
        b = rng.randrange(n)
        r[k] = rng.choice([
            (rng.randrange(n), target, block, block + 1, add), (source, rng.randrange(n), block, block + 1, add),
            (source, target, b, b + 1, add), (source, target, block, block + 1, not add), rng.choice(rng.choice(right)),
        ])  # fmt: skip
        if rng.random() < 0.2:
            r.append(rng.choice(rng.choice(right)))
        rounds = [
            [((s + j) % n, (t + j) % n, (b + j) % n, (b + j) % n + 1, add) for s, t, b, _, add in r for j in range(n)] for r in firsts
        ]
        assert shifted_rounds_hold(collective, n, firsts) == (prove_rounds(collective, n, rounds) is None)


def test_a_block_that_is_replaced_twice_in_a_round_is_no_shifted_round():
    twice = [(1, 0, 1, 2, False), (2, 0, 2, 3, False), (2, 0, 2, 3, False)]
    assert shifted_rounds_hold("spread", 3, [twice[:2]])
    assert not shifted_rounds_hold("spread", 3, [twice])


def test_shifted_rounds_of_fewer_ranks_do_not_stand_for_those_of_all():
    """Among 99 ranks this algorithm adds up on the first three only: no check of few ranks sees it."""

    class Small(Algorithm):
        name = "small"

        def reduce(self, n):
            return (Shifted(among := 3 if n == 99 else n, *(Transfer(0, d, d, d + 1, True) for d in range(1, among))),)

    register(Small())
    try:
        assert check_rounds_of("small", "reduce", 9, 1, tuple(range(9))) is None
        assert check_rounds_of("small", "reduce", 99, 1, tuple(range(99))) is not None
    finally:
        ALGORITHMS.pop("small")
