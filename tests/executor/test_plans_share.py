"""Plans of one program share what no size changes; each is the plan that a program gets of which nothing was planned before."""

import random

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan import planner
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.kernel_selection import PartChoice
from fluidx.executor.plan.planner import plan
from fluidx.ir import FeedError, NotInitializedError, TensorType
from fluidx.ir.operator import Operator, Role
from fluidx.ir.parts import Part
from fluidx.ops.kernels import KernelBody
from tests.sweep import examples

L = fx.layers
BATCHES = (0, 1, 2, 3, 5, 8, 31, 32, 33, 64)


def told(p):
    """All that a plan says."""
    steps = [(tuple(map(str, s.ops)), *s[1:]) for s in p.all_steps()]
    return str(p), steps, p.values, p.buffers, p.feeds, p.fetches, p.fetch_types, p.absent, p.waits_at_end, p.thread_bytes


def dense():
    x, label = fx.data("x", [-1, 12]), fx.data("label", [-1, 1], "int64")
    h = L.layer_norm(L.fc(x, 16, act="relu"))
    h = L.fc(L.dropout(h, 0.3), 16, act="gelu")
    h = L.reshape(L.transpose(L.reshape(h, [0, 4, 4]), [0, 2, 1]), [0, 16]) * 1.0 + h
    return L.mean(L.softmax_with_cross_entropy(L.fc(h, 5), label))


def images():
    x, label = fx.data("x", [-1, 3, 8, 8]), fx.data("label", [-1, 1], "int64")
    h = L.relu(L.batch_norm(L.conv2d(x, 16, 3, padding=1)))
    h = L.pool2d(L.elementwise_add(L.relu(L.conv2d(h, 16, 3, padding=1)), h), 2, "max", 2)
    return L.mean(L.softmax_with_cross_entropy(L.fc(h, 5), label))


def attention():
    x = fx.data("x", [-1, 6, 24])
    q, k, v = (L.transpose(L.reshape(part, [0, 0, 2, 4]), [0, 2, 1, 3]) for part in L.split(L.fc(x, 24, num_flatten_dims=2), 3, dim=2))
    h = L.reshape(L.transpose(L.scaled_dot_product_attention(q, k, v, causal=True), [0, 2, 1, 3]), [0, 0, 8])
    return L.mean(L.tanh(h) + L.sum([h, h * h]))


def repeated():
    x = fx.data("x", [-1, 4])
    n = L.fill_constant([1], "int64", 3)
    _, total = L.while_loop(lambda i, t: i < n, lambda i, t: [i + 1, L.relu(t * 2.0) + x], [L.fill_constant([1], "int64", 0), x])
    return L.mean(L.cond(L.reduce_sum(total) > 0.0, lambda: total, lambda: total * -1.0))


def halves():
    x = fx.data("x", [-1, 4], "float16")
    return L.mean(L.softmax(L.relu(x) + L.scale(x, 2.0)))


MODELS = [dense, images, attention, repeated, halves]


def written(model):
    loss = model()
    if model in (dense, images, attention):
        fx.optimizer.Adam(1e-3).minimize(loss)
    return fx.default_main_program(), loss.name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(examples(1, 3)))
def test_a_plan_hangs_on_none_before_it(model, seed):
    main, loss = written(model)
    ways = [(b, {"fetch": fetch, "fuse": fuse}) for b in BATCHES for fetch in ([loss], None) for fuse in (True, False)]
    fresh = {repr(way): told(dry_plan(main.copy(), batch=way[0], **way[1])) for way in ways}
    order = random.Random(seed).sample(2 * ways, 2 * len(ways))
    for batch, options in order:
        assert told(dry_plan(main, batch=batch, **options)) == fresh[repr((batch, options))], f"batch {batch}, {options}"


@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "ring_optimizer"])
def test_a_plan_of_a_rank_hangs_on_none_before_it(strategy):
    main, loss = written(dense)
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=fx.default_startup_program(), trainers=3)
    for rank in range(3):
        program = t.get_trainer_program(rank)
        fresh = {b: told(dry_plan(program.copy(), batch=b)) for b in (1, 3, 5, 12)}  # fewer rows than ranks, too: some have none
        for b in (12, 1, 5, 3, 1, 12, 3):
            assert told(dry_plan(program, batch=b)) == fresh[b], f"rank {rank}, batch {b}"


def planned(program, types, fetch, held=None, **options):
    return plan(program, types, [v.name for v in fetch], held or {}, RunContext(), **options)


def f32(*shape):
    return TensorType("float32", shape)


def test_what_hands_on_a_value_at_one_size_is_asked_at_each():
    x = fx.data("x", [-1, 2])
    y = L.tanh(L.reshape(x, [2, -1]))
    steps = [len(planned(fx.default_main_program(), {"x": f32(n, 2)}, [y]).steps) for n in (2, 4, 2, 1, 4, 2)]
    assert steps == [1, 2, 1, 2, 2, 1]  # at two rows the reshape leaves its operand as it is


def test_a_constant_is_folded_anew_where_it_follows_from_a_size():
    x = fx.data("x", [-1, 3])
    y = L.exp(L.fill_constant_batch_size_like(x, [-1, 2], "float32", 1.0))
    for n in (2, 5, 2, 1, 5):
        p = planned(fx.default_main_program(), {"x": f32(n, 3)}, [y])
        assert p.fetch_types == (f32(n, 2),) and p.values[y.name].type == f32(n, 2)


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_cells_that_differ_in_size_have_no_kernel_whatever_was_planned_before():
    x = fx.data("x", [1, 1, -1, -1])
    y = L.adaptive_pool2d(x, [2, 2], "avg")
    found = [planned(fx.default_main_program(), {"x": f32(1, 1, n, n)}, [y]).steps[0].kernel for n in (4, 5, 6, 7, 4)]
    assert found[0::2] == ["native"] * 3 and "native" not in found[1::2]


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_attributes_that_are_equal_and_not_the_same_are_apart():
    x = fx.data("x", [-1, 3])
    ys = [L.fill_constant_batch_size_like(x, [-1, 2], "float32", value) for value in (0.0, -0.0, 0.0, -0.0)]
    exe = fx.Executor()
    for rows in (2, 3, 1, 2):
        found = exe.run(feed={"x": np.zeros((rows, 3), "float32")}, fetch_list=ys)
        assert [bool(np.signbit(a).all()) for a in found] == [False, True, False, True]


def test_other_devices_bodies_and_rewrites_are_asked_apart():
    main, loss = written(dense)
    state = {n: np.zeros(d.type.shape, d.type.dtype) for n, d in main.global_block().descs.items() if d.persistable}
    ways = [{}, {"natively": False}, {"device": "cuda"}, {"rewrite": False}, {"fuse": False}]
    types = {"x": f32(4, 12), "label": TensorType("int64", (4, 1))}

    def made(program, way):
        return told(plan(program, types, [loss], state, RunContext(), **way))

    fresh = [made(main.copy(), way) for way in ways]
    for k in (0, 1, 2, 3, 4, 3, 2, 1, 0):
        assert made(main, ways[k]) == fresh[k], ways[k]


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_levels_of_instructions_are_asked_apart():
    main, loss = written(images)
    for level in (*native.levels(), *native.levels()):
        with native.at_level(level):
            assert told(dry_plan(main, batch=4)) == told(dry_plan(main.copy(), batch=4)), level


def test_a_program_that_is_written_on_is_looked_at_again():
    x = fx.data("x", [-1, 2])
    y = L.exp(x)
    main = fx.default_main_program()
    assert len(planned(main, {"x": f32(3, 2)}, [y]).steps) == 1
    state = main.global_block().create_var("state", [3, 2], "float32", persistable=True)
    L.assign(y, output=state)
    assert len(planned(main, {"x": f32(3, 2)}, [y]).steps) == 2
    state.persistable = False
    assert len(planned(main, {"x": f32(3, 2)}, [y]).steps) == 1


def test_operators_put_in_the_place_of_others_are_looked_at():
    x = fx.data("x", [-1, 2])
    y = L.exp(x)
    main = fx.default_main_program()
    planned(main, {"x": f32(3, 2)}, [y])
    block = main.global_block()
    block.oplist[0] = block.oplist[0].replace(type="tanh", role=Role.FORWARD)
    assert [s.op.type for s in planned(main, {"x": f32(3, 2)}, [y]).steps] == ["tanh"]


def test_what_is_fed_and_what_is_fetched_are_apart():
    x = fx.data("x", [-1, 2])
    h = L.exp(x)
    y = L.softmax(h)
    main, types = fx.default_main_program(), {"x": f32(3, 2)}
    for _ in range(2):
        assert len(planned(main, types, [y]).steps) == 2
        assert len(planned(main, types, [h]).steps) == 1
        assert len(planned(main, {"x": f32(3, 2), h.name: f32(3, 2)}, [y]).steps) == 1


def test_errors_come_again():
    x = fx.data("x", [-1, 2])
    y = L.fc(x, 3)
    main, types = fx.default_main_program(), {"x": f32(4, 2)}
    scope = Scope()
    fx.Executor().run(fx.default_startup_program(), scope=scope)
    for _ in range(2):
        planned(main, types, [y], scope.arrays)
        with pytest.raises(FeedError, match="feed is missing variable 'x'"):
            planned(main, {}, [y], scope.arrays)
        with pytest.raises(NotInitializedError, match="run the startup program first"):
            planned(main, types, [y])
        with pytest.raises(FeedError, match="run the startup program again"):
            planned(main, types, [y], {n: np.zeros((7, 7), "float32") for n in scope.arrays})


def test_notes_stay_with_the_program():
    main, loss = written(dense)
    dry_plan(main, batch=2)
    assert main.notes and not main.copy().notes and not main.clone().notes


def test_a_program_that_is_asked_for_everything_keeps_a_bounded_part_of_it():
    x = fx.data("x", [-1, 2])
    ys = [L.scale(x, float(k)) for k in range(80)]
    main = fx.default_main_program()
    for y in ys:
        assert len(planned(main, {"x": f32(3, 2)}, [y], rewrite=False).steps) == 1
    assert len(main.notes) <= 64


# -- ranks ------------------------------------------------------------------------------------------------------------------------------


def plans_made(monkeypatch, strategy, ranks, rows, model=dense):
    """How many plans the main programs of ranks take, and the plan that each rank runs with one that is made for it alone."""
    main, loss = written(model)
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=fx.default_startup_program(), trainers=ranks)
    made, real = [], planner._planned
    monkeypatch.setattr(planner, "_planned", lambda *args: made.append(1) or real(*args))
    feed = {"x": np.ones((rows, 12), "float32"), "label": np.zeros((rows, 1), "int64")}
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exe:
        exe.run_startup()
        made.clear()
        exe.run([loss], feed)
        count, pairs = len(made), []
        for rank in exe.group.ranks:
            bound, scope = rank.current, rank.scope
            p = bound.plan
            types = {n: TensorType(str(a.dtype), a.shape) for n, a in feed.items()}
            own = plan(p.program.copy(), types, p.fetches, scope.arrays, bound.ctx)
            pairs.append((p, own._replace(program=p.program)))
    return count, pairs


@pytest.mark.parametrize("strategy, ranks, rows, count", [
    ("data_parallel", 8, 16, 1),
    ("data_parallel", 3, 7, 2),  # ranks of three rows, and of two
    ("data_parallel", 3, 2, 2),  # one rank has none
    ("zero3", 4, 8, 2),  # of the five numbers of a bias, one rank has two
    ("ring_optimizer", 2, 4, 2),  # each rank sends to another, and has operators of its own
])  # fmt: skip
def test_ranks_share_a_plan_where_programs_and_sizes_are_equal(monkeypatch, strategy, ranks, rows, count):
    found, pairs = plans_made(monkeypatch, strategy, ranks, rows)
    assert found == count
    for rank, (shared, own) in enumerate(pairs):
        assert shared.program.rank == rank
        assert told(shared) == told(own)


def test_ranks_that_draw_parts_of_one_value_share_a_plan_in_which_each_has_its_part(monkeypatch):
    found, pairs = plans_made(monkeypatch, "data_parallel", 4, 8)
    boxes = [next(s.here.part.box for s in p.steps if s.op.type == "dropout") for p, _ in pairs]
    assert found == 1 and boxes == [((2 * r, 2 * r + 2), (0, 16)) for r in range(4)]


def test_a_kernel_is_chosen_anew_for_a_part_that_it_does_not_cover():
    at_start = KernelBody("native", None, covers=lambda ins, outs, attrs, ctx, part: part.start == 0)
    any_part = KernelBody("any", None)
    where = ((2, 3), np.dtype("float32"), (12, 4))
    for chosen, start, holds in ((at_start, 0, True), (at_start, 4, False), (any_part, 0, False), (any_part, 4, True)):
        choice = PartChoice(Operator("dropout", {}, {}), (at_start, any_part), chosen, {}, [where, None], [[where]])
        assert choice.holds(RunContext(), Part(start=start)) is holds
