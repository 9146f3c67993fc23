"""Mixed precision inside branches and loops, and `amp` in the text of a strategy."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramError, np_dtype
from fluidx.rewrite import Amp, rewritten
from fluidx.testing.models import TestModel, train_ranks, train_single

L = fx.layers
WIDTH = 4


def integers(rng, *shape):
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-1, 2, shape).astype("float32")))


def reals(rng, *shape):
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer((rng.standard_normal(shape) / 2).astype("float32")))


def branch(h, weight):
    w, v = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
    return L.cond(L.reduce_sum(h) > 1.0, lambda: L.relu(L.matmul(h, w)), lambda: L.matmul(L.matmul(h, v), w))


def loop(h, weight):
    """Two rounds of h = relu(h @ w) - h, with a bound, so that gradients know how much room rounds need."""
    w = weight(WIDTH, WIDTH)
    k = L.fill_constant([1], "int64", 0)
    _, h = L.while_loop(lambda k, h: k < 2, lambda k, h: [k + 1, L.relu(L.matmul(h, w)) - h], [k, h], max_rounds=2)
    return h


def branch_in_loop(h, weight):
    w, v = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
    k = L.fill_constant([1], "int64", 0)

    def body(k, h):
        return [k + 1, L.cond(k > 0, lambda: L.matmul(h, w), lambda: L.relu(L.matmul(h, v)))]

    _, h = L.while_loop(lambda k, h: k < 2, body, [k, h], max_rounds=2)
    return h


BODIES = {"branch": branch, "loop": loop, "branch in loop": branch_in_loop}
every_body = pytest.mark.parametrize("body", BODIES)


def model(body, weight=integers, optimizer=None):
    main, startup = fx.Program("bodies"), fx.Program("bodies_startup")
    rng = np.random.default_rng(5)
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, WIDTH], "float32")
        h = L.matmul(x, L.create_parameter([WIDTH, WIDTH], "float32", attr=weight(rng, WIDTH, WIDTH)))
        h = BODIES[body](h, lambda *shape: L.create_parameter(list(shape), "float32", attr=weight(rng, *shape)))
        loss = L.reduce_sum(h * h) if weight is integers else L.mean(L.square(h))
        pairs = [] if optimizer is None else optimizer.minimize(loss)[1]

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        drawn = rng.integers(-1, 2, (rows, WIDTH)) if weight is integers else rng.standard_normal((rows, WIDTH))
        return {"x": drawn.astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def half(optimizer, dtype="bfloat16"):
    return fx.mixed_precision.decorate(optimizer, dtype=dtype, init_loss_scaling=1.0, use_dynamic_loss_scaling=False)


def products(program):
    """The dtypes that the products of each block read."""
    return [{b.desc(n).type.dtype for op in b.oplist if op.type == "matmul" for n in op.input_arg_names} for b in program.blocks]


@every_body
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_in_bodies_work_in_16_bits_and_state_stays_float32(body, dtype):
    main = rewritten(model(body).main, [Amp(dtype)])
    assert [d for d in products(main) if d] == [{dtype}] * sum(map(bool, products(main)))
    assert any(products(main)[1:])
    assert {d.type.dtype for d in main.global_block().descs.values() if d.persistable} == {"float32"}
    assert fx.Program.parse_from_string(str(main)) == main


@every_body
@pytest.mark.parametrize("how", ["decorate", "amp"])
def test_a_step_over_small_integers_has_the_bits_of_float32(body, how):
    """Every value and every sum is a whole number below 2^8, which bfloat16 has, or a power of two times one."""
    plain = model(body, optimizer=fx.optimizer.SGD(0.5))
    other = model(body, optimizer=half(fx.optimizer.SGD(0.5)) if how == "decorate" else fx.optimizer.SGD(0.5))
    if how == "amp":
        other.main = rewritten(other.main, [Amp()], fetch=[other.loss])
        other.loss = other.loss.name
    feeds = [plain.feed(1)]
    (one, state), (two, again) = (train_single(m, feeds, [m.loss]) for m in (plain, other))
    assert any("bfloat16" in d for d in products(other.main)[1:])
    assert np.abs(one).max() < 2**8
    assert np.array_equal(one, two)
    for p, _ in plain.gradients:
        assert np.array_equal(state.get(p), again.get(p)), p


@every_body
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_real_values_are_those_of_float32_within_the_digits_of_16_bits(body, dtype):
    plain = model(body, reals, optimizer=fx.optimizer.SGD(0.0))
    other = model(body, reals, optimizer=half(fx.optimizer.SGD(0.0), dtype))
    feeds = [plain.feed(3)]
    grads = [g for _, g in plain.gradients]
    (one,), _ = train_single(plain, feeds, [plain.loss, *grads])
    (two,), _ = train_single(other, feeds, [other.loss, *grads])
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np_dtype(dtype).itemsize == 2
    for a, b in zip(one, two, strict=True):
        # a few dozen roundings on the way to a value, each by half a unit of it, and terms that cancel
        np.testing.assert_allclose(b, a, rtol=32 * unit, atol=32 * unit * np.abs(a).max())


STRATEGIES = ["data_parallel", "zero1", "fsdp"]


@every_body
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["decorate", "amp"])
def test_two_ranks_train_with_bodies_in_16_bits(body, strategy, how):
    optimizer = fx.optimizer.Momentum(0.125, 0.5)
    m = model(body, optimizer=half(optimizer) if how == "decorate" else optimizer)
    feeds = [m.feed(2)]
    if how == "amp":
        one, scope = train_single(TestModel(rewritten(m.main, [Amp()]), m.startup, m.loss.name, m.feed, m.gradients), feeds, [m.loss.name])
        many, state = train_ranks(m, f"{strategy},amp{{dtype=bfloat16}}", 2, feeds, [m.loss.name])
    else:
        one, scope = train_single(m, feeds, [m.loss])
        many, state = train_ranks(m, strategy, 2, feeds, [m.loss])
    assert np.array_equal(one, many)
    for name, value in state.items():
        assert np.array_equal(scope.get(name), value), name


def test_a_branch_leaves_16_bits_where_both_were_worked_out_in_these():
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, flag = fx.data("x", [-1, WIDTH], "float32"), fx.data("flag", [1], "bool")
        w = L.create_parameter([WIDTH, WIDTH], "float32", name="w")
        both = L.cond(flag, lambda: L.matmul(x, w), lambda: L.relu(L.matmul(x, w)))
        one = L.cond(flag, lambda: L.matmul(x, w), lambda: L.softmax(x))
    main = rewritten(main, [Amp()])
    descs = main.global_block().descs
    assert (descs[both.name].type.dtype, descs[one.name].type.dtype) == ("bfloat16", "float32")


def test_what_a_branch_reads_is_cast_in_front_of_it_only_if_it_was_before():
    """A cast made in one branch is no value of the other."""
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, flag = fx.data("x", [-1, WIDTH], "float32"), fx.data("flag", [1], "bool")
        w, v = (L.create_parameter([WIDTH, WIDTH], "float32", name=n) for n in "wv")
        h = L.matmul(x, w)
        L.cond(flag, lambda: L.matmul(h, v), lambda: L.matmul(L.matmul(h, v), w))
    casts = [[op.input_arg_names[0] for op in b.oplist if op.type == "cast"] for b in rewritten(main, [Amp()]).blocks]
    assert casts == [["x", "w"], ["v"], ["v"]]


# -- amp as a rewrite ----------------------------------------------------------------------------------------------------------------


def mlp(optimizer=None):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    rng = np.random.default_rng(3)
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6], "float32")
        h = L.fc(x, 5, act="relu", param_attr=integers(rng, 6, 5), bias_attr=integers(rng, 5))
        loss = L.reduce_sum(L.square(L.fc(h, 4, param_attr=integers(rng, 5, 4), bias_attr=integers(rng, 4))))
        pairs = (optimizer or fx.optimizer.Momentum(0.125, 0.5)).minimize(loss)[1]

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-1, 2, (rows, 6)).astype("float32")}

    return TestModel(main, startup, loss.name, feed, [(p.name, g.name) for p, g in pairs])


def test_a_training_program_is_rewritten_forward_and_backward_and_updates_stay():
    m = mlp()
    main = rewritten(m.main, [Amp()])
    block = main.global_block()
    muls = [op for op in main.ops if op.type in ("mul", "matmul", "mul_grad")]
    assert len(muls) > 2 and {block.desc(n).type.dtype for op in muls for n in op.input_arg_names} == {"bfloat16"}
    updates = [op for op in main.ops if op.role is fx.ir.Role.OPTIMIZE]
    assert {block.desc(n).type.dtype for op in updates for n in (*op.input_arg_names, *op.output_arg_names)} == {"float32"}
    finished = {op.role_var[k + 1]: op for op in main.ops for k in range(0, len(op.role_var), 2)}
    assert set(finished) == {g for _, g in m.gradients}
    assert all(g in op.output_arg_names for g, op in finished.items())


def test_rewriting_a_training_program_again_changes_nothing():
    once = rewritten(mlp().main, [Amp()])
    assert rewritten(once, [Amp()]) == once


def test_float16_without_a_scaled_loss_is_refused():
    with pytest.raises(ProgramError, match=r"vanish in float16 without a scaled loss; take amp\{dtype=bfloat16\}, or train with mixed_pr"):
        rewritten(mlp().main, [Amp("float16")])
    with pytest.raises(ProgramError, match="amp: unknown dtype 'bfloat61'; did you mean 'bfloat16'?"):
        Amp("bfloat61")


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2", "fsdp", "ring_optimizer", "reduce_broadcast"])
def test_amp_stands_in_the_text_of_a_strategy(strategy):
    m = mlp()
    text = f"{strategy},join_attention,amp{{dtype=bfloat16}}"
    made = fx.strategies.get(text)
    assert made.rewrites[-1] == Amp() and fx.strategies.get(str(made)) == made
    one, scope = train_single(TestModel(rewritten(m.main, [Amp()]), m.startup, m.loss, m.feed, m.gradients), [m.feed(2)], [m.loss])
    many, state = train_ranks(m, text, 2, [m.feed(2)], [m.loss])
    assert np.array_equal(one, many)
    for name, value in state.items():
        assert np.array_equal(scope.get(name), value), name


def test_lists_are_exceptions_for_amp_too():
    lists = fx.mixed_precision.AutoMixedPrecisionLists(custom_black_list=["mul"])
    main = rewritten(mlp().main, [Amp(lists=lists)])
    block = main.global_block()
    assert {block.desc(n).type.dtype for op in main.ops if op.type == "mul" for n in op.input_arg_names} == {"float32"}
