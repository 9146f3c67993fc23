"""Gradients of loops: against central differences, against the loop unrolled in Python, in single programs and on many ranks."""

import json

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramPair
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.opdef import OPS, Effect
from fluidx.testing import interpret, numeric_grad
from fluidx.verify import verify_ranks
from tests.transpiler.models import STRATEGIES

L = fx.layers


def check(build, feeds, sizes=(3,), bounds=(0,)):
    """Build y of float64 inputs and the integer n; its gradients against central differences, in executor and interpreter."""
    for bound in bounds:
        with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
            xs = [fx.data(f"x{k}", [size], "float64") for k, size in enumerate(sizes)]
            n = fx.data("n", [1], "int64")
            loss = L.reduce_sum(build(*xs, n, bound))
            grads = fx.gradients([loss], xs)
            main, exe, rng = fx.default_main_program(), fx.Executor(), np.random.default_rng(0)
            assert fx.Program.parse_from_string(str(main)) == main
            for rounds in feeds:
                feed = {x.name: rng.uniform(0.2, 0.9, size) for x, size in zip(xs, sizes, strict=True)} | {"n": np.int64([rounds])}
                found, again = (exe.run(feed=feed, fetch_list=grads) for _ in range(2))
                env = interpret(main, feed)
                for x, g, g2, v in zip(xs, found, again, grads, strict=True):
                    want = numeric_grad(lambda _: exe.run(feed=feed, fetch_list=[loss])[0].item(), feed[x.name])  # noqa: B023
                    # central differences of float64 are accurate to about 1e-9 of the loss
                    np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-8, err_msg=f"{rounds} rounds, {x.name}")
                    assert g.tolist() == g2.tolist()
                    # native kernels and NumPy add in different orders
                    np.testing.assert_allclose(g, env[v.name], rtol=1e-13)


def counted(n, body, states, bound=0):
    """`body(i, *states)` for i from 0 to n - 1."""
    i = L.zeros([1], "int64")
    made = L.while_loop(
        lambda i, *s: L.less_than(i, n), lambda i, *s: [L.increment(i, in_place=False), *body(i, *s)], [i, *states], max_rounds=bound
    )
    return made[1:]


def test_loop_carried_values_and_outer_values():
    check(lambda x, w, n, k: counted(n, lambda i, h: [L.tanh(h * w + x)], [x], k)[0], [0, 1, 2, 7], (3, 3), bounds=(0, 9))


def test_a_state_that_starts_as_a_constant():
    check(lambda x, n, k: counted(n, lambda i, h: [h * x + L.square(x)], [L.ones([3], "float64")])[0], [0, 3])


def test_states_that_swap_and_results_that_are_read_again():
    def build(x, y, n, k):
        a, b = counted(n, lambda i, a, b: [b * y, L.sin(a)], [x, x * y])
        return a * b + L.exp(a) + counted(n, lambda i, a: [a * b], [a])[0]

    check(build, [0, 1, 4], (2, 2))


def test_nested_loops():
    def build(x, n, k):
        def body(i, h):
            (inner,) = counted(i, lambda j, u: [L.sin(u) + h * x], [h], k)
            return [inner * x]

        return counted(n, body, [x], k)[0]

    check(build, [0, 1, 4], bounds=(0, 5))


def test_a_branch_in_a_loop():
    def build(x, n, k):
        def body(i, h):
            odd = L.equal(L.elementwise_mod(i, L.fill_constant([1], "int64", 2)), L.ones([1], "int64"))
            return [L.cond(odd, lambda: h * x, lambda: L.sin(h) + x)]

        return counted(n, body, [x])[0]

    check(build, [0, 1, 5])


def test_a_branch_that_writes_a_loop_carried_value():
    def build(x, n, k):
        h, i = L.scale(x, 1.0), L.zeros([1], "int64")
        more = L.less_than(i, n)
        with L.While(more).block():
            odd = L.equal(L.elementwise_mod(i, L.fill_constant([1], "int64", 2)), L.ones([1], "int64"))
            with L.Switch() as switch:
                with switch.case(odd):
                    L.assign(L.square(h) * x, output=h)
                with switch.default():
                    L.assign(L.sin(h), output=h)
            L.increment(i)
            L.less_than(i, n, cond=more)
        return h

    check(build, [0, 1, 5])


def test_a_condition_that_is_computed_from_data():
    def build(x, n, k):
        top = L.fill_constant([1], "float64", 20.0)
        h, s = L.while_loop(lambda h, s: L.less_than(s, top), lambda h, s: [h * 1.5, L.reduce_sum(h * 1.5)], [x, L.reduce_sum(x)])
        return h * s

    check(build, [0])


def test_a_value_written_several_times_in_an_iteration():
    def build(x, n, k):
        h, i, kept = L.scale(x, 1.0), L.zeros([1], "int64"), L.zeros([3], "float64")
        more = L.less_than(i, n)
        with L.While(more).block():
            L.assign(L.square(h), output=h)
            L.assign(kept + h * x, output=kept)
            L.assign(L.sin(h), output=h)
            L.increment(i)
            L.less_than(i, n, cond=more)
        return h * kept

    check(build, [0, 1, 3])


def test_a_loop_is_bitwise_equal_to_the_loop_unrolled_in_python():
    def made(unrolled):
        with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
            x, w = fx.data("x", [2, 2], "float64"), fx.data("w", [2, 2], "float64")
            h = x
            if unrolled:
                for _ in range(4):
                    h = L.matmul(h, w) - x
            else:
                (h,) = counted(L.fill_constant([1], "int64", 4), lambda i, h: [L.matmul(h, w) - x], [x])
            grads = fx.gradients([h], [x, w])
            feed = {"x": np.float64([[1, 2], [-1, 3]]), "w": np.float64([[2, -1], [1, 1]])}
            return [g.tolist() for g in fx.Executor().run(feed=feed, fetch_list=[h, *grads])]

    assert made(False) == made(True)


def test_a_bound_ends_the_loop():
    n = fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [h * 2.0], [L.ones([1], "float32")], 3)
    assert [fx.Executor().run(feed={"n": np.int64([k])}, fetch_list=[h])[0].item() for k in (0, 2, 3, 8)] == [1, 4, 8, 8]


def test_only_values_that_the_gradient_reads_are_stashed():
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    a, b = counted(n, lambda i, a, b: [a + x, L.square(b)], [x, x])
    fx.gradients([a * b], [x])
    ops = fx.default_main_program().ops
    assert [op.input("X") for op in ops if op.type == "stash"] == [(b.name,)]


def test_a_program_for_tests_has_no_stashes():
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [L.sin(h)], [x])
    plain = str(fx.default_main_program())
    fx.gradients([h], [x])
    assert "stash" in str(fx.default_main_program())
    assert str(fx.default_main_program().clone(for_test=True)) == plain


@pytest.mark.parametrize("body", [lambda x, h: h * h, lambda x, h: h * x])
def test_the_gradient_of_a_gradient_of_a_loop_is_refused(body):
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [body(x, h)], [x])
    (g,) = fx.gradients([h], [x])
    with pytest.raises(fx.ProgramError, match="this is the gradient of a loop, and second derivatives of loops are not implemented"):
        fx.gradients([g], [x])


def test_two_gradients_of_one_loop():
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [h * h * x], [x])
    (one,), (other,) = fx.gradients([h], [x]), fx.gradients([L.square(h)], [x])
    xs, power = np.array([0.5, 1.5, -1.0]), 1
    for rounds in range(4):
        found = fx.Executor().run(feed={"x": xs, "n": np.int64([rounds])}, fetch_list=[h, one, other])
        # h is x to this power; products of a few float64 are right to a few units in the last place
        for a, b in zip(found, (xs**power, power * xs ** (power - 1), 2 * power * xs ** (2 * power - 1)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        power = 2 * power + 1


def test_a_loop_with_its_gradient_is_the_same_program_from_text_and_json():
    x, n = fx.data("x", [3], "float64"), fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [h * h * x], [x], 5)
    fx.gradients([h], [x])
    main = fx.default_main_program()
    assert fx.Program.parse_from_string(str(main)) == main
    assert from_json(json.loads(json.dumps(to_json(main)))) == main


# -- training -------------------------------------------------------------------------------------------------------------------


def recurrent(steps=3, bound=0):
    """A recurrent network over the time axis of x, as a loop."""
    x, y = fx.data("x", [-1, steps, 2], "float64"), fx.data("y", [-1, 2], "float64")
    w, u = (L.create_parameter([2, 2], "float64", name=name, default_initializer=fx.initializer.Constant(1.0)) for name in "wu")
    time = L.transpose(x, [1, 0, 2])
    h = L.fill_constant_batch_size_like(x, [-1, 2], "float64", 0.0)

    def body(i, h):
        return [L.matmul(h, w) + L.matmul(L.reshape(L.gather(time, i), [-1, 2]), u)]

    (h,) = counted(L.fill_constant([1], "int64", steps), body, [h], bound)
    return x, y, h


def test_a_recurrent_network_learns_to_add():
    x, y, h = recurrent()
    loss = L.mean(L.square(h - y))
    fx.optimizer.SGD(0.05).minimize(loss)
    exe, rng = fx.Executor(), np.random.default_rng(0)
    exe.run(fx.default_startup_program())
    xs = rng.uniform(-1, 1, (16, 3, 2))
    feed = {"x": xs, "y": xs.sum(1)}
    losses = [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]


EVERY = {
    **STRATEGIES,
    "parameter_server": lambda: fx.strategies.parameter_server(2, min_block=4),
    "parameter_server, parts of weights": lambda: fx.strategies.parameter_server(2, min_block=1),
    "reduction_servers": lambda: fx.strategies.reduction_servers(2),
    "halving_doubling": lambda: fx.strategies.data_parallel(algorithm="halving_doubling"),
    "double_binary_tree": lambda: fx.strategies.data_parallel(algorithm="double_binary_tree"),
    "micro_batches": lambda: fx.strategies.micro_batches(2),
    "micro_batches of zero1": lambda: fx.strategies.micro_batches(2, fx.strategies.zero1()),
}
MEET = {name for name, op in OPS.items() if op.effect in (Effect.COLLECTIVE, Effect.P2P)}


def trained(build, strategy, trainers=2, fetch=("w", "u")):
    """The fetches of one device and of ranks in two steps, on small integers; and the communication operators in the loops of rank 0."""

    def run(strategy):
        with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard(), fx.scope_guard(fx.Scope()):
            loss = build()
            main, startup = fx.default_main_program(), fx.default_startup_program()
            rng = np.random.default_rng(1)
            feeds = [
                {d.name: rng.integers(-1, 2, (4, *d.shape[1:])).astype(float) for d in main.list_vars() if d.is_data} for _ in range(2)
            ]
            if strategy is None:
                exe = fx.Executor()
                exe.run(startup)
                return [exe.run(main, feed=f, fetch_list=[loss, *fetch]) for f in feeds], set()
            t = fx.DistributeTranspiler(strategy)
            t.transpile(program=main, startup_program=startup, trainers=trainers)
            assert t.verify()
            with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size)) as exe:
                exe.run_startup()
                found = [exe.run(feed=f, fetch_list=[loss.name, *fetch]) for f in feeds]
            return found, MEET & {op.type for b in t.get_trainer_program(0).blocks[1:] for op in b.ops}

    (one, _), (many, inside) = run(None), run(strategy)
    return [[np.asarray(a).tolist() for step in found for a in step] for found in (one, many)], inside


def recurrent_loss(bound):
    x, y, h = recurrent(bound=bound)
    loss = L.reduce_sum(h * y)
    fx.optimizer.SGD(0.25).minimize(loss)
    return loss


@pytest.mark.parametrize("strategy", EVERY)
def test_ranks_train_it_as_one_device_does(strategy):
    (one, many), inside = trained(lambda: recurrent_loss(4 if "parameter" in strategy else 0), EVERY[strategy]())
    assert one == many
    # sharded weights are gathered where an iteration reads them, if at all; gradients are reduced after the loop
    assert inside <= ({"all_gather"} if strategy in ("zero3", "fsdp") else set())


def test_hosts_train_it_over_their_rails():
    (one, many), inside = trained(lambda: recurrent_loss(0), fx.strategies.rails(), fx.Cluster(2, 2))
    assert one == many and not inside


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_stage_has_its_own_loops(schedule):
    def build():
        x, y = fx.data("x", [-1, 3], "float64"), fx.data("y", [-1, 3], "float64")
        h = x
        for stage, name in enumerate("wu"):
            with fx.device_guard(f"stage:{stage}"):
                w = L.create_parameter([3, 3], "float64", name=name, default_initializer=fx.initializer.Constant(1.0))
                (h,) = counted(L.fill_constant([1], "int64", 2), lambda i, h: [L.matmul(h, w)], [h])  # noqa: B023
        with fx.device_guard("stage:1"):
            loss = L.reduce_sum(h * y)
        fx.optimizer.SGD(2**-6).minimize(loss)
        return loss

    (one, many), inside = trained(build, fx.strategies.pipeline(2, schedule), fx.Mesh(pp=2, dp=2))
    assert one == many and not inside


def test_the_sum_over_iterations_of_partial_sums_is_reduced_once():
    def build():
        x, y = fx.data("x", [-1, 2], "float64"), fx.data("y", [-1, 2], "float64")
        w = L.create_parameter([2, 2], "float64", name="w", default_initializer=fx.initializer.Constant(1.0))
        n, start = L.fill_constant([1], "int64", 3), L.fill_constant([1], "float64", 2.0)
        h, total = counted(n, lambda i, h, total: [L.matmul(h, w), total + L.reduce_sum(h * y)], [x, start])
        fx.optimizer.SGD(2**-4).minimize(total)
        return total

    for strategy in (fx.strategies.data_parallel(), fx.strategies.micro_batches(2), fx.strategies.reduction_servers(2)):
        (one, many), inside = trained(build, strategy, fetch=("w",))
        assert one == many and not inside


def test_a_sum_that_decides_about_iterations_is_reduced_in_each():
    def build():
        x, y = fx.data("x", [-1, 2], "float64"), fx.data("y", [-1, 2], "float64")
        w = L.create_parameter([2, 2], "float64", name="w", default_initializer=fx.initializer.Constant(1.0))
        top = L.fill_constant([1], "float64", 40.0)
        h, total = L.while_loop(
            lambda h, total: L.less_than(total, top),
            lambda h, total: [L.matmul(h, w), total + L.reduce_sum(L.square(h)) + 1.0],
            [x, L.fill_constant([1], "float64", 0.0)],
        )
        loss = L.reduce_sum(h * y) + total
        fx.optimizer.SGD(2**-8).minimize(loss)
        return loss

    (one, many), inside = trained(build, fx.strategies.data_parallel(), fetch=("w",))
    assert one == many and inside == {"all_reduce"}


def test_rows_of_a_bounded_stash_that_no_iteration_wrote_are_zero():
    x, n = fx.data("x", [2], "float64"), fx.data("n", [1], "int64")
    (h,) = counted(n, lambda i, h: [h * h], [x], 3)
    fx.gradients([h], [x])
    (stash,) = (op.output("Out")[0] for op in fx.default_main_program().ops if op.type == "stash")
    for rounds, want in ((3, [3, 9, 81]), (1, [3, 0, 0])):
        (found,) = fx.Executor().run(feed={"x": np.full(2, 3.0), "n": np.int64([rounds])}, fetch_list=[stash])
        assert found.tolist() == [[v, v] for v in want]


@pytest.mark.parametrize(
    "right, wrong",
    [
        # an iteration drops the sum of those before it
        ("= sum([%w@GRAD@while1, %w@GRAD@block2])", "= sum([%w@GRAD@block2, %w@GRAD@block2])"),
        ("= sum([%w@GRAD@while1, %w@GRAD@block2])", "= assign(%w@GRAD@while1)"),  # the weight does not change
        ("partial(sum) over dp stop_gradient = fill_zeros_like(%w)", "partial(sum) over dp stop_gradient = fill_any_like(%w) {value=1.0}"),
        # partial sums declared whole
        ("%w@GRAD@while1: f64[2,2] partial(sum) over dp stop_gradient", "%w@GRAD@while1: f64[2,2] stop_gradient"),
    ],
)
def test_the_proof_refuses_a_loop_with_another_sum(right, wrong):
    recurrent_loss(0)
    main, startup = fx.default_main_program(), fx.default_startup_program()
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(bucket_mb=0)).transpile(program=main, startup_program=startup, trainers=2)
    texts = [str(t.get_trainer_program(r)) for r in range(2)]
    assert all(text.count(right) == 1 for text in texts)

    def verify(texts):
        verify_ranks(ProgramPair(main, startup), [*map(fx.Program.parse_from_string, texts)], [t.get_startup_program(r) for r in range(2)])

    verify(texts)
    for changed in ([text.replace(right, wrong) for text in texts], [texts[0], texts[1].replace(right, wrong)]):
        with pytest.raises(fx.VerifyError):
            verify(changed)


def test_a_value_that_a_loop_adds_to_is_replicated_before_it():
    def build():
        h, x = fx.data("h", [-1, 2], "float64"), fx.data("x", [-1, 2], "float64")
        w = L.create_parameter([2, 2], "float64", name="w", default_initializer=fx.initializer.Constant(2.0))
        shift = L.reduce_sum(L.matmul(x, w))
        _, end = L.while_loop(lambda i, h: i < 3.0, lambda i, h: [i + 1.0, h + shift], [L.fill_constant([1], "float64", 0.0), h])
        return L.reduce_sum(end)

    main, startup = fx.default_main_program(), fx.default_startup_program()
    loss, exe = build(), fx.Executor()
    fx.optimizer.SGD(2.0**-6).minimize(loss)
    feeds = [{"h": np.arange(6.0).reshape(3, 2), "x": np.arange(6.0).reshape(3, 2) - k} for k in range(2)]
    exe.run(startup)
    want = [exe.run(main, feed=f, fetch_list=[loss])[0].item() for f in feeds]
    t = fx.DistributeTranspiler(fx.strategies.data_parallel()).transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        assert [ranks.run(feed=f, fetch_list=[loss])[0].item() for f in feeds] == want  # small integers and powers of 2
