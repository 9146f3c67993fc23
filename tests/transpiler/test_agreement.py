"""What transpile() takes is proved and gives the values of one device; what it does not take, it refuses by itself."""

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx import strategies as S
from fluidx.testing.models import train_ranks, train_single
from tests.sweep import ALL, examples
from tests.transpiler import tensor_models
from tests.transpiler.control_models import model, recipes

ALGORITHMS = ("", "auto", "ring", "star", "tree", "double_binary_tree", "halving_doubling", "direct")
SMALL = 48 / 2**20  # MiB


def agree(built, strategy, trainers, rows=(5, 6)):
    """False where transpile() refuses; else the ranks are proved and compared with one device, in the first two steps and their state."""
    feeds = [built.feed(n, k) for k, n in enumerate(rows)]
    try:
        fx.DistributeTranspiler(strategy).transpile(program=built.main, startup_program=built.startup, trainers=trainers)
    except fx.TranspileError as e:
        event(f"refused: {str(e)[:60]}")
        return False
    single, scope = train_single(built, feeds, [built.loss])
    values, state = train_ranks(built, strategy, trainers, feeds, [built.loss])  # proves them first
    np.testing.assert_allclose(values, single, rtol=1e-9, atol=1e-12)
    for n, a in state.items():
        np.testing.assert_allclose(a, scope.get(n), rtol=1e-8, atol=1e-10, err_msg=n)
    return True


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a])
def test_what_a_loop_adds_up_is_added_up_whatever_the_algorithm(algorithm):
    assert agree(model((("loop", 2, ("fc", "mean")),)), S.data_parallel(algorithm=algorithm), 2)


def test_explain_says_why_a_collective_in_a_loop_stays_whole():
    built = model((("loop", 2, ("mean",)),))
    t = fx.DistributeTranspiler(S.data_parallel(algorithm="ring"))
    t.transpile(program=built.main, startup_program=built.startup, trainers=2)
    assert any("is left to the communicator: it is in a loop" in line for line in t.explain())


@pytest.mark.parametrize("strategy", [S.parameter_server, S.reduction_servers])
@pytest.mark.parametrize("algorithm", ["", "ring"])
@pytest.mark.parametrize(
    "recipe",
    [
        (("cond", "flag", ("mean", "fc"), ("scale",)),),
        (("cond", "flag", (("cond", "size", ("fc", "mean"), ("centred",)),), ("scale",)),),
        (("loop", 2, ("mean", "parameter")),),
    ],
    ids=["branch", "nested", "loop"],
)
def test_trainers_may_meet_in_blocks_beside_servers(recipe, strategy, algorithm):
    assert agree(model(recipe), strategy(2, algorithm=algorithm), 2)


@pytest.mark.parametrize("algorithm", ["star", "double_binary_tree"])
def test_a_loop_in_a_branch_that_sends_messages_is_the_loop_of_one_device(algorithm):
    recipe = (("cond", "flag", ("fc",), (("loop", 2, ("fc",)), "centred")),)
    assert agree(model(recipe), S.data_parallel(algorithm=algorithm), 2)


def test_blocks_of_gradients_that_nobody_reads_are_in_no_ones_way():
    inner = ("cond", "flag", (("loop", 1, ("parameter",)),), (("loop", 3, ("fc",)),))
    assert agree(model((("loop", 2, (inner,)),)), S.data_parallel(cpu_offload=True), 2)


@pytest.mark.parametrize("strategy", [S.data_parallel, S.zero1, S.zero3, S.fsdp], ids=lambda s: s.__name__)
@pytest.mark.parametrize("algorithm", ["double_binary_tree", "ring"])
def test_an_algorithm_carries_what_it_can_on_a_mesh(strategy, algorithm):
    assert agree(tensor_models.gpt(1), strategy(algorithm=algorithm), fx.Mesh(dp=2, tp=2), rows=(2, 3))


sizes = st.sampled_from([2, 3])
of_all = st.fixed_dictionaries({}, optional={"algorithm": st.sampled_from(ALGORITHMS), "cpu_offload": st.just(True)})


def over(make, **options):
    """A strategy with its own options and those of all."""
    return st.builds(lambda own, common: make(**own, **common), st.fixed_dictionaries({}, optional=options), of_all)


buckets = {"bucket_mb": st.sampled_from([0, SMALL]), "first_bucket_mb": st.just(SMALL / 3)}
whole = st.one_of(
    over(S.data_parallel, **buckets, overlap=st.booleans()),
    over(S.reduce_broadcast),
    over(S.ring_optimizer, chunk_mb=st.sampled_from([SMALL, 4])),
    over(S.zero1, **buckets),
    over(S.zero2, **buckets),
    over(S.zero3, reshard_after_forward=st.booleans()),
    over(S.fsdp, units=st.sampled_from([SMALL, "scope", "parameter"]), prefetch=st.integers(0, 2)),
)
served = st.one_of(
    st.builds(lambda n, a: S.parameter_server(n, min_block=4, algorithm=a), sizes, st.sampled_from(ALGORITHMS)),
    st.builds(lambda n, a: S.reduction_servers(n, algorithm=a), sizes, st.sampled_from(ALGORITHMS)),
)
strategies = st.one_of(whole, served, st.builds(S.micro_batches, sizes, whole), st.builds(lambda: S.rails(slice_mb=SMALL)))
trainers = st.sampled_from([1, 2, 3, fx.Cluster(2, 1), fx.Cluster(2, 2), fx.Mesh(dp=2, tp=2), fx.Mesh(tp=2, dp=1)])


@settings(max_examples=examples(15, 1500), deadline=None, suppress_health_check=list(HealthCheck), derandomize=not ALL)
@given(recipes, strategies, trainers)
def test_what_transpile_takes_is_proved_and_gives_one_devices_values(recipe, strategy, trainers):
    agree(model(recipe), strategy, trainers)


def test_a_trainer_whose_branch_is_another_is_refused_beside_servers():
    built = model((("cond", "flag", ("mean",), ("scale",)),))
    t = fx.DistributeTranspiler(S.parameter_server(1)).transpile(program=built.main, startup_program=built.startup, trainers=2)
    mains, startups = ([get(r).copy() for r in range(3)] for get in (t.get_trainer_program, t.get_startup_program))
    block = mains[1].blocks[1]
    k = next(k for k, op in enumerate(block.oplist) if op.type == "tanh")
    block.oplist[k] = block.oplist[k].replace(type="sigmoid")
    with pytest.raises(fx.VerifyError, match="wait for each other|does not hold|rank 1"):
        fx.verify.verify_ranks(t.source, mains, startups)
