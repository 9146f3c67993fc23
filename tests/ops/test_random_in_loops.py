"""Random numbers in loops: iterations draw new numbers, the gradient draws those of its iteration, ranks draw those of one device."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramPair
from fluidx.testing import interpret
from fluidx.verify import verify_ranks
from tests.ops.test_loop_gradient import counted, trained

L = fx.layers


def run(build, feed, runs=1):
    """The fetches of build(n) in `runs` runs, and the interpreter's for the first run; the integer n is the number of iterations."""
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
        fetch = build(fx.data("n", [1], "int64"))
        main, exe = fx.default_main_program(), fx.Executor()
        feed = feed | {"n": np.int64([feed["n"]])}
        found = [exe.run(main, feed=feed, fetch_list=fetch) for _ in range(runs)]
        env = interpret(main, feed)
    for a, v in zip(found[0], fetch, strict=True):
        assert a.tolist() == env[v.name].tolist()
    return found


def drawn(n, draw, rows=8):
    """The value of `draw(i)`, a float64 [4], in each iteration."""
    (table,) = counted(n, lambda i, table: [L.scatter(table, i, L.reshape(draw(i), [1, 4]))], [L.zeros([rows, 4], "float64")])
    return table


@pytest.mark.parametrize("op", ["uniform_random", "gaussian_random", "dropout"])
def test_each_iteration_and_each_run_draws_other_numbers(op):
    def draw(i):
        return L.dropout(L.ones([4], "float64"), 0.5) if op == "dropout" else getattr(L, op)([4], dtype="float64")

    first, second = run(lambda n: [drawn(n, draw)], {"n": 8}, runs=2)
    rows = {tuple(row) for (table,) in (first, second) for row in table.tolist()}
    assert len(rows) > 5 if op == "dropout" else len(rows) == 16  # 4 elements have 16 masks, so some masks repeat
    assert run(lambda n: [drawn(n, draw)], {"n": 8}, runs=2)[1][0].tolist() == second[0].tolist()


def test_nested_loops_and_branches_draw_other_numbers_too():
    def build(n):
        def draw(i):
            even = L.equal(L.elementwise_mod(i, L.fill_constant([1], "int64", 2)), L.zeros([1], "int64"))
            return L.cond(even, lambda: L.uniform_random([4], "float64"), lambda: L.uniform_random([4], "float64"))

        return counted(n, lambda i, t: [L.concat([L.slice(t, [0], [3], [9]), drawn(n, draw, 3)])], [L.zeros([9, 4], "float64")])

    ((table,),) = run(build, {"n": 3})
    assert len(set(table.ravel().tolist())) == 36


def test_draws_after_a_loop_do_not_depend_on_its_iterations():
    def build(n):
        return [drawn(n, lambda i: L.uniform_random([4], "float64")), L.uniform_random([4], "float64", seed=7)]

    assert run(build, {"n": 1})[0][1].tolist() == run(build, {"n": 5})[0][1].tolist()


@pytest.mark.parametrize("bound", [0, 6])
def test_the_gradient_of_an_iteration_has_the_mask_of_the_iteration(bound):
    """h = mask * h * w + h in each iteration; the bits of a number record which elements are kept."""

    def build(n):
        x, w = fx.data("x", [64], "float64"), fx.data("w", [64], "float64")

        def body(i, h, kept):
            def branch():
                mask = L.dropout(L.ones([64], "float64"), 0.5)
                return [mask * h * w + h, kept * 2.0 + mask]

            return L.cond(L.less_than(i, n), branch, lambda: [h, kept])

        h, kept = counted(n, body, [x, L.zeros([64], "float64")], bound)
        return [h, kept, *fx.gradients([L.reduce_sum(h)], [x, w])]

    x, w = np.arange(64) % 5 + 1.0, np.arange(64) % 3 - 1.0
    for h, kept, gx, gw in run(build, {"n": 4, "x": x, "w": w}, runs=2):
        count = sum(kept.astype(int) >> k & 1 for k in range(4))
        assert set(count) > {1, 2, 3}
        # small integers: exact in any order
        assert h.tolist() == (x * (1 + w) ** count).tolist()
        assert gx.tolist() == ((1 + w) ** count).tolist()
        assert gw.tolist() == (x * count * (1 + w) ** np.maximum(count - 1, 0)).tolist()


def test_the_gradient_of_a_loop_in_a_loop_has_the_masks_of_both():
    def build(n):
        w = fx.data("w", [64], "float64")

        def inner(j, total, kept):
            mask = L.dropout(L.ones([64], "float64"), 0.5)
            return [total + mask * w * w, kept + mask]

        total, kept = counted(n, lambda i, *s: counted(n, inner, list(s)), [L.zeros([64], "float64")] * 2)
        return [kept, *fx.gradients([L.reduce_sum(total)], [w])]

    w = np.arange(64) % 7 - 3.0
    ((kept, gw),) = run(build, {"n": 3, "w": w})
    assert len(set(kept)) > 4 and gw.tolist() == (2 * w * kept).tolist()


def noisy_loss():
    """A recurrent net with dropout on its state in each iteration, in numbers that stay small integers."""
    x, y = fx.data("x", [-1, 3], "float64"), fx.data("y", [-1, 3], "float64")
    w = L.create_parameter([3, 3], "float64", name="w", default_initializer=fx.initializer.Constant(1.0))
    (h,) = counted(L.fill_constant([1], "int64", 3), lambda i, h: [L.matmul(L.dropout(h, 0.5), w) + x], [x])
    loss = L.reduce_sum(h * y)
    fx.optimizer.SGD(2**-6).minimize(loss)
    return loss


@pytest.mark.parametrize("strategy", [fx.strategies.data_parallel(), fx.strategies.zero3(), fx.strategies.micro_batches(2)])
def test_ranks_draw_what_one_device_draws(strategy):
    (one, many), _ = trained(noisy_loss, strategy, fetch=("w",))
    assert one == many


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # the gradient draws in the order of the iterations, although it runs them backwards
        (", %assign.tmp_0) {sub_block=block 2}", ", _) {sub_block=block 2}"),
        # it draws with a counter that does not change
        (", %assign.tmp_0) {sub_block=block 2}", ", %while1@ROUNDS) {sub_block=block 2}"),
    ],
)
def test_the_proof_refuses_a_gradient_that_draws_other_masks(right, wrong):
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
        noisy_loss()
        source = ProgramPair(fx.default_main_program(), fx.default_startup_program())
        t = fx.DistributeTranspiler(fx.strategies.data_parallel()).transpile(
            program=source.main, startup_program=source.startup, trainers=2
        )
    texts, startups = [str(t.get_trainer_program(r)) for r in range(2)], [t.get_startup_program(r) for r in range(2)]
    assert all(text.count(right) == 1 for text in texts)
    verify_ranks(source, [*map(fx.Program.parse_from_string, texts)], startups)
    with pytest.raises(fx.VerifyError):
        verify_ranks(source, [fx.Program.parse_from_string(text.replace(right, wrong)) for text in texts], startups)


def test_the_proof_distinguishes_draws_in_and_outside_of_a_loop():
    draw = "%u: f32[2] = uniform_random() {per_run=true, seed=3, shape=[2]}"
    text = """program p {{
      data %n: i64[1]
      data %x: f32[2]
      forward:
      {}
      %y: f32[2] = assign(%x)
      %i: i64[1] = fill_constant() {{dtype="int64", shape=[1]}}
      %go: bool[1] = less_than(%i, %n)
      [%y, %i, %go] = while(%go, [%y, %i, %go, %n]) {{sub_block=block 1}}
      block 1 in 0 {{
        {}
        %y = elementwise_add(%y, %u)
        %i = increment(%i)
        %go = less_than(%i, %n)
      }}
    }}"""
    inside, outside = (fx.Program.parse_from_string(text.format(*places)) for places in (("", draw), (draw, "")))
    verify_ranks(ProgramPair(inside, fx.Program()), [inside], [fx.Program()])
    with pytest.raises(fx.VerifyError):
        verify_ranks(ProgramPair(inside, fx.Program()), [outside], [fx.Program()])
