"""Gradients that travel as 16-bit floats: what is sent, what that costs in accuracy, and what the proof says of it."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import np_dtype
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.verify import verify_ranks

HALVES = ["float16", "bfloat16"]
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of rounding to the nearest
EVERY = {
    "data_parallel": fx.strategies.data_parallel,
    "one by one": lambda **wire: fx.strategies.data_parallel(bucket_mb=0, **wire),
    "a ring": lambda **wire: fx.strategies.data_parallel(algorithm="ring", **wire),
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring_optimizer": fx.strategies.ring_optimizer,
    "zero1": fx.strategies.zero1,
    "zero2 along axes": lambda **wire: fx.strategies.zero2(bucket_mb=0, **wire),
    "fsdp": fx.strategies.fsdp,
    "servers": lambda **wire: fx.strategies.parameter_server(2, min_block=8, **wire),
}


def transpiled(model, strategy, trainers):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, fx.Cluster(2, 2)], ids=str)
@pytest.mark.parametrize("strategy", EVERY.values(), ids=EVERY)
def test_what_16_bits_hold_arrives_as_it_was_sent(strategy, ranks):
    # terms and sums are whole numbers below 2048, which float16 has exactly; ranks are no power of two where there are 3
    model = integer_mlp("sum")
    feeds = [model.feed(8)]
    (one,), scope = train_single(model, feeds, [model.loss])
    (many,), state = train_ranks(model, strategy(wire="float16"), ranks, feeds, [model.loss])
    assert np.array_equal(one[0], many[0])
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("wire", HALVES)
def test_terms_are_rounded_once_and_added_up_in_32_bits(wire, ranks):
    model = classifier()
    t = transpiled(model, fx.strategies.data_parallel(wire=wire), ranks)
    gradients = [g for _, g in model.gradients]
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks), timeout=20) as exe:
        exe.run_startup()
        values = exe.run(feed=model.feed(24), fetch_list=[*gradients, *[f"{g}.sum" for g in gradients]], return_merged=False)
    scale = np.float32({2: 0.5, 3: 0.25, 4: 0.25}[ranks] if wire == "float16" else 1.0)
    half = np_dtype(wire)
    for terms, sums in zip(values[: len(gradients)], values[len(gradients) :], strict=True):
        sent = [(x * scale).astype(half).astype("float32") for x in terms]
        total = sent[0]
        for x in sent[1:]:
            total = total + x
        for got in sums:
            assert np.array_equal(got, total.astype(half).astype("float32") / scale)
        exact = sum(x.astype("float64") for x in terms)
        # each term is rounded and so is the sum; below the smallest normal number (float16: 2**-14) the error is absolute
        bound = UNIT[wire] * (sum(abs(x.astype("float64")) for x in terms) + abs(exact)) * (1 + 2 * UNIT[wire])
        assert (abs(sums[0] - exact) <= bound + (ranks + 1) * 2.0**-25 / scale).all()


def summed(size):
    """A model whose gradient is the sum of what is fed."""
    main, startup = fx.Program("summed"), fx.Program("summed_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, size], "float32")
        w = fx.layers.create_parameter([size], "float32", name="w", default_initializer=fx.initializer.Constant(0.0))
        fx.optimizer.SGD(1.0).minimize(fx.layers.reduce_sum(x * w))
    return main, startup


@pytest.mark.parametrize("options, finite", [({}, True), ({"wire_scale": 0.125}, True), ({"wire_scale": 1.0}, False)], ids=str)
def test_a_sum_does_not_overflow_where_the_mean_fits(options, finite):
    main, startup = summed(2)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(wire="float16", **options))
    t.transpile(program=main, startup_program=startup, trainers=4)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(4), timeout=20) as exe, np.errstate(over="ignore"):
        exe.run_startup()
        exe.run(feed={"x": np.full((4, 2), 30000, "float32")})  # 120,000 together; float16 ends at 65,504
        assert exe.state("w").tolist() == ([-120000.0] * 2 if finite else [-np.inf] * 2)


# -- what is narrowed -----------------------------------------------------------------------------------------------------------------


def sent(t):
    """{dtype of what is sent: how often} of what is added up."""
    block, found = t.main.global_block(), {}
    for op in t.main.ops:
        if op.type in ("all_reduce", "reduce", "reduce_scatter"):
            dtype = block.desc(op.input_arg_names[0]).type.dtype
            found[dtype] = found.get(dtype, 0) + 1
    return found


def test_norms_and_what_backward_goes_on_with_are_sent_as_they_are():
    clip = fx.clip.GradientClipByGlobalNorm(1.0)
    t = transpiled(classifier(fx.optimizer.SGD(0.1, grad_clip=clip)), fx.strategies.zero1(wire="float16"), 2)
    assert sent(t) == {"float16": 1, "float32": 1}  # a bucket; the sum of the squares
    # mean and variance of the batch, in backward the gradients of scale and bias together; one bucket
    t = transpiled(classifier(kind="batch_norm"), fx.strategies.data_parallel(wire="float16"), 2)
    assert sent(t) == {"float16": 1, "float32": 3}


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast"])
def test_half_the_bytes_of_gradients_are_sent(strategy):
    model, n = integer_mlp(), 4
    plain, narrow = (transpiled(model, fx.strategies.get(strategy, wire=wire), n) for wire in ("", "float16"))
    gradients = 4 * (6 * 5 + 5 + 5 * 4 + 4)
    once = 2 if strategy == "data_parallel" else 1  # an all_reduce counts as two ways
    for r in range(n):
        assert plain.traffic(r).total - narrow.traffic(r).total == pytest.approx(once * (n - 1) / n * gradients / 2)


def test_16_bit_gradients_stay_as_they_are():
    main, startup = fx.Program("half"), fx.Program("half_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        fx.optimizer.SGD(1.0).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 3], "float16"), 2)))
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(wire="bfloat16"))
    t.transpile(program=main, startup_program=startup, trainers=2)
    assert "narrow" not in [op.type for op in t.main.ops]


# -- the proof ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", HALVES)
def test_the_report_says_how_many_values_are_rounded(wire):
    model = integer_mlp()
    assert f"  rounded      59 values travel as {wire}\n" in str(transpiled(model, fx.strategies.zero2(wire=wire), 3).verify())
    assert "rounded" not in str(transpiled(model, "zero2", 3).verify())


def changed(main, type, to="", **attrs):
    """The first operator of a type is of another one, or has other attributes."""
    ops = main.global_block().oplist
    k = next(k for k, op in enumerate(ops) if op.type == type)
    given = {n: v for n, v in ops[k].attrs.items() if n in fx.ir.opdef(to or type).attrs}
    ops[k] = ops[k].replace(type=to or type, attrs=fx.ir.opdef(to or type).complete_attrs({**given, **attrs}))


WRONG = {
    "scaled by less": {"type": "scale", "scale": 0.5},
    "not scaled": {"type": "scale", "to": "assign"},
    "cast, which is not exact": {"type": "narrow", "to": "cast"},
    "cast back": {"type": "widen", "to": "cast"},
    "of another dtype": {"type": "narrow", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("what", WRONG.values(), ids=WRONG)
def test_what_is_not_the_same_value_in_exact_arithmetic_is_refused(what):
    t = transpiled(integer_mlp(), fx.strategies.data_parallel(wire="float16"), 3)
    mains = [t.get_trainer_program(r).copy() for r in range(3)]
    startups = [t.get_startup_program(r) for r in range(3)]
    verify_ranks(t.source, mains, startups)
    for main in mains:
        changed(main, **what)
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, mains, startups)
