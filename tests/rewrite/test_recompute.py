"""The rewrite Recompute: which values are computed again, what stays, and the same bits on one device and on ranks."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.rewrite import Amp, JoinCrossEntropy, Recompute
from fluidx.testing.models import TestModel, train_ranks, train_single

from ..transpiler.models import MODELS, model_of, same_answers

L = fx.layers
WIDTH = 4


def chain(depth=9):
    """A product with a parameter, and tanh behind tanh. The gradient of tanh reads its result."""
    main, startup = fx.Program("chain"), fx.Program("chain_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        w = L.create_parameter([WIDTH], "float32", name="w")
        h = fx.data("x", [-1, WIDTH], "float32") * w
        for _ in range(depth):
            h = L.tanh(h)
        fx.optimizer.SGD(0.5).minimize(L.reduce_sum(h))
    return main, startup


def copies(program):
    """The values that are computed again, in order."""
    return [n.removesuffix("@RECOMPUTE") for op in program.ops for n in op.output_arg_names if n.endswith("@RECOMPUTE")]


def test_nine_equal_values_are_cut_into_three_segments():
    """Nine values that backward reads, and one is alive at each cut: sqrt(9 / 1) segments. The third and the sixth are kept, the last
    segment is kept whole. The first segment begins with the product, which is computed again too."""
    main, _ = chain()
    again = Recompute().run(main)
    t = [f"tanh_{k}.tmp_0" for k in range(9)]
    assert copies(again) == [t[3], t[4], main.ops[0].output_arg_names[0], t[0], t[1]]
    back = [op.input("Out")[0] for op in again.ops if op.type == "tanh_grad"]
    assert back == [t[8], t[7], t[6], t[5], f"{t[4]}@RECOMPUTE", f"{t[3]}@RECOMPUTE", t[2], f"{t[1]}@RECOMPUTE", f"{t[0]}@RECOMPUTE"]
    assert all(op.role is fx.ir.Role.BACKWARD for op in again.ops if any("@RECOMPUTE" in n for n in op.output_arg_names))
    assert [str(op) for op in main.ops] == [str(op) for op in chain()[0].ops]  # the given program is as it was


def test_a_copy_is_computed_right_before_its_first_reader():
    again = Recompute().run(chain()[0])
    order = [op.output_arg_names[0] for op in again.ops]
    at = order.index("tanh_3.tmp_0@RECOMPUTE")
    assert order[at + 1] == "tanh_4.tmp_0@RECOMPUTE" and again.ops[at + 2].input("Out") == ("tanh_4.tmp_0@RECOMPUTE",)


def test_memory_is_that_of_the_kept_values_and_a_segment():
    """36 values in 6 segments: 5 kept, 6 of a segment, 2 gradients at work, and some room; without recompute 36."""
    main, _ = chain(36)
    value = 1024 * WIDTH * 4
    assert dry_plan(main, batch=1024).arena_bytes >= 36 * value
    assert dry_plan(Recompute().run(main), batch=1024).arena_bytes <= (5 + 6 + 2 + 1) * value


def test_the_cuts_are_those_of_a_backward_pass_that_recomputes():
    main, _ = chain(16)
    with fx.unique_name.guard(), fx.program_guard(told := fx.Program("chain"), fx.Program()):
        h = fx.data("x", [-1, WIDTH], "float32") * L.create_parameter([WIDTH], "float32", name="w")
        for _ in range(16):
            h = L.tanh(h)
        fx.optimizer.RecomputeOptimizer(fx.optimizer.SGD(0.5), "auto").minimize(L.reduce_sum(h))
    ours, theirs = (dry_plan(p, batch=1024).arena_bytes for p in (Recompute().run(main), told))
    assert ours <= theirs


def test_a_value_that_is_overwritten_before_backward_is_not_computed_again():
    """`b` reads a counter that the program then advances: a second `b` would be another value. It is kept."""
    main, startup = fx.Program("counted"), fx.Program("counted_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        w, c = L.create_parameter([WIDTH], "float32", name="w"), L.create_global_var([WIDTH], 1.0, "float32", persistable=True, name="c")
        a = fx.data("x", [-1, WIDTH], "float32") * w
        b = L.elementwise_add(a, c, name="b")
        t = L.tanh(b)
        L.increment(c)
        for _ in range(8):
            t = L.tanh(t)
        fx.optimizer.SGD(0.5).minimize(L.reduce_sum(t))
    again = copies(Recompute().run(main))
    assert len(again) >= 3 and not {a.name, b.name} & {*again}


def test_running_statistics_advance_once():
    """A batch_norm overwrites its statistics: its results are kept, and what is around it is computed again."""
    main = model_of("conv").main
    again = Recompute().run(main)
    assert [op.type for op in again.ops].count("batch_norm") == [op.type for op in main.ops].count("batch_norm") == 1


def test_nothing_is_changed_where_there_is_no_backward_pass_or_one_segment():
    main = fx.Program("eval")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        L.mean(L.tanh(fx.data("x", [-1, 4], "float32")))
    job = fx.rewrite.Job()
    assert str(Recompute().run(main, job)) == str(main)
    assert job.log == ["Recompute changed nothing: the backward pass of program eval reads no values between two cuts"]


def test_texts_name_it():
    assert str(fx.strategies.get("zero1{bucket_mb=4},recompute")) == "zero1{bucket_mb=4},recompute"
    assert fx.strategies.get("zero1,recompute") == fx.strategies.zero1().with_rewrites(Recompute())


# -- the same answers ---------------------------------------------------------------------------------------------------------------------


def integers(seed):
    """A random net in numbers that stay small integers in one step: products with -1, 0 and 1, sums with earlier values, relu, dropout that
    doubles what it keeps."""
    rng = np.random.default_rng(seed)
    main, startup = fx.Program(f"integers_{seed}"), fx.Program(f"integers_{seed}_startup")

    def whole(shape):
        return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-1, 2, shape).astype("float64")))

    with fx.unique_name.guard(), fx.program_guard(main, startup):
        values = [fx.data("x", [-1, WIDTH], "float64")]
        for _ in range(int(rng.integers(6, 12))):
            h = values[-1]
            kind = rng.integers(0, 4)
            if kind == 0 and len(values) > 1:
                h = L.elementwise_add(h, values[int(rng.integers(1, len(values)))])
            elif kind == 1:
                h = L.dropout(h, 0.5, dropout_implementation="upscale_in_train")
            elif kind == 2:
                h = L.elementwise_mul(L.relu(h), L.sign(h))
            else:
                h = L.relu(L.fc(h, WIDTH, param_attr=whole((WIDTH, WIDTH)), bias_attr=whole((WIDTH,))))
            values.append(h)
        h = L.fc(values[-1], 2, param_attr=whole((WIDTH, 2)), bias_attr=False)
        loss = L.reduce_sum(h)
        _, pairs = fx.optimizer.SGD(0.5).minimize(loss)
    main.random_seed = startup.random_seed = 7

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-2, 3, (rows, WIDTH)).astype("float64")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_recompute_are_one_device_that_does_not_bit_for_bit(seed):
    model = integers(seed)
    strategy = fx.strategies.get(["data_parallel", "zero1", "zero2", "fsdp"][seed % 4]).with_rewrites(Recompute())
    feeds = [model.feed(8)]
    (one,), scope = train_single(model, feeds, [model.loss])
    (many,), state = train_ranks(model, strategy, 2, feeds, [model.loss])
    assert np.array_equal(one[0], many[0])
    for name, value in state.items():
        assert np.array_equal(value, scope.get(name)), name


@pytest.mark.parametrize("name", [n for n in MODELS if n != "recomputed"])
def test_every_kind_of_model_trains_as_without_it(name):
    same_answers(name, fx.strategies.zero2().with_rewrites(Recompute()), 3)


@pytest.mark.parametrize("name", ["gpt", "conv", "branch"])
@pytest.mark.parametrize("strategy", [fx.strategies.micro_batches(2), fx.strategies.fsdp(units=1 / 2**10)], ids=str)
def test_it_works_below_other_cuts(name, strategy):
    same_answers(name, strategy.with_rewrites(Recompute()), 2, rows=(8, 8))


def test_it_follows_other_rewrites():
    model = model_of("mlp")
    made = fx.strategies.zero1().with_rewrites(JoinCrossEntropy(), Recompute())
    t = fx.DistributeTranspiler(made).transpile(program=model.main, startup_program=model.startup, trainers=2)
    t.verify()
    main, startup = chain(12)
    made = fx.strategies.zero1().with_rewrites(Amp(), Recompute())
    t = fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=2)
    assert any("@RECOMPUTE" in n for op in t.main.ops for n in op.output_arg_names)
    t.verify()


def test_a_copy_that_differs_is_not_proved():
    """The proof is against the program that was given: a pass that computes something else again is refused."""

    class Wrong(Recompute):
        def rewrite(self, program, job):
            made = super().rewrite(program, job)
            block = made.global_block()
            block.oplist = [
                op.replace(type="sigmoid") if "@RECOMPUTE" in op.output_arg_names[0] and op.type == "tanh" else op for op in block.oplist
            ]
            return made

    main, startup = chain()
    t = fx.DistributeTranspiler(fx.strategies.data_parallel().with_rewrites(Wrong()))
    with pytest.raises(fx.FluidxError):
        t.transpile(program=main, startup_program=startup, trainers=2).verify()
