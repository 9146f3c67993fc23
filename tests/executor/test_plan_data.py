"""A plan is data: it can be read and compared, allocates nothing, and says how many bytes a run takes."""

import tracemalloc

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind
from fluidx.ir import TensorType
from fluidx.testing.models import classifier

L = fx.layers


def planned(program, feed, fetch, scope, **options):
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}
    return plan(program, types, fetch, scope.arrays, RunContext(), **options)


def trained(width=256, rows=64, optimizer=None):
    """A classifier of two layers, its startup run: program, scope, feed, and the name of the loss."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 64]), fx.data("label", [-1, 1], "int64")
        h = L.fc(L.fc(x, width, act="relu"), width, act="gelu")
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(h, 10), label))
        (optimizer or fx.optimizer.Adam(1e-3)).minimize(loss)
    scope = Scope()
    fx.Executor().run(startup, scope=scope)
    return main, scope, {"x": np.ones((rows, 64), "float32"), "label": np.zeros((rows, 1), "int64")}, loss.name


def test_equal_programs_have_equal_plans_and_making_one_touches_nothing():
    main, scope, feed, loss = trained()
    before = {n: a.copy() for n, a in scope.arrays.items()}
    first, second = (planned(main, feed, [loss], scope) for _ in range(2))
    assert first == second and str(first) == str(second)
    assert set(before) == set(scope.arrays) and all(np.array_equal(a, scope.arrays[n]) for n, a in before.items())
    with pytest.raises(AttributeError):
        first.arena_bytes = 0


def test_a_plan_holds_no_arrays():
    main, scope, feed, loss = trained()
    seen = []

    def walk(value):
        assert not isinstance(value, np.ndarray)
        if isinstance(value, tuple | list):
            for v in value:
                walk(v)
        elif isinstance(value, dict):
            walk(list(value.values()))
        seen.append(value)

    walk([v for k, v in planned(main, feed, [loss], scope)._asdict().items() if k != "program"])
    assert len(seen) > 100


def test_values_that_live_at_the_same_time_lie_apart():
    """Checked from the record alone, for every pair of buffers and scratch of the arena."""
    main, scope, feed, loss = trained()
    p = planned(main, feed, [loss], scope, natively=False)
    held = [(b.offset, b.nbytes, b.start, b.stop) for b in p.buffers if b.kind == "arena"]
    held += [(s.offset, s.type.nbytes, k, k) for k, step in enumerate(p.steps) for s in step.scratch]
    assert any(step.scratch for step in p.steps)
    for i, (a, n, start, stop) in enumerate(held):
        assert a + n <= p.arena_bytes
        for b, m, begin, end in held[:i]:
            assert stop < begin or end < start or a + n <= b or b + m <= a


def test_binding_allocates_what_the_plan_says():
    main, scope, feed, loss = trained(width=512, rows=512)
    p = planned(main, feed, [loss], scope)
    said = p.arena_bytes + p.nbytes("feed")
    tracemalloc.start()
    bound = bind(p, scope, RunContext())
    bound.run(feed)
    arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    tracemalloc.stop()
    held = sum(s.size for s in arrays.statistics("filename"))
    assert said > 1_000_000 and abs(held - said) < 0.05 * said


def test_what_threads_keep_for_kernels_is_said():
    if not native.enabled():
        pytest.skip(native.why_not())
    main = fx.Program("image")
    with fx.program_guard(main):
        y = L.conv2d(fx.data("x", [-1, 32, 16, 16]), 32, 3, padding=1, bias_attr=False)
    scope, feed = Scope(), {"x": np.ones((4, 32, 16, 16), "float32")}
    scope.set(main.all_parameters()[0].name, np.ones((32, 32, 3, 3), "float32"))
    p = planned(main, feed, [y.name], scope)
    # 16 matrices of 64 tiles by 32 channels, in and out, and an image either way at the least; not twice as much
    least = 4 * (16 * 64 * (32 + 32) + 2 * 32 * 16 * 16)
    assert least <= p.thread_bytes < 2 * least and str(p).splitlines()[0].endswith(f", each thread {p.thread_bytes}")
    assert planned(main, feed, [y.name], scope, natively=False).thread_bytes == 0


def test_a_result_in_the_place_of_its_operand_is_one_array_object():
    """NumPy looks into whether two arrays overlap, unless they are the same object."""
    main = fx.Program("chain")
    with fx.program_guard(main):
        y = L.relu(L.tanh(L.scale(fx.data("x", [8]), 2.0)))
    feed = {"x": np.ones(8, "float32")}
    bound = bind(planned(main, feed, [y.name], Scope(), fuse=False), Scope(), RunContext())
    arrays = [bound.arrays[op.output_arg_names[0]] for op in main.ops]
    assert all(a is arrays[0] for a in arrays)


def test_the_text_says_what_runs_and_where():
    main, startup = fx.Program("small"), fx.Program("small_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4])
        y = L.reduce_sum(L.reshape(L.scale(x, 2.0), [-1, 2, 2]), dim=[1])
    text = str(planned(main, {"x": np.ones((8, 4), "float32")}, [y.name], Scope(), natively=False))
    lines = text.splitlines()
    assert lines[0] == "plan of program small: 3 steps, arena 192 bytes, feeds 128, state 0"
    assert [line.split()[1:3] for line in lines[1:]] == [["numpy", "scale:"], ["view", "reshape:"], ["any", "reduce_sum:"]]
    assert "as %scale_0.tmp_0" in lines[2]


def test_steps_of_sub_blocks_are_part_of_the_plan():
    main = fx.Program("branches")
    with fx.unique_name.guard(), fx.program_guard(main):
        x = fx.data("x", [1])
        y = L.cond(x > 0.0, lambda: x * 2.0, lambda: x - 1.0)
    p = planned(main, {"x": np.ones(1, "float32")}, [y.name], Scope())
    assert [s.kernel for s in p.steps if s.op.type == "cond"] == ["control"]
    assert sorted(s.op.type for s in p.all_steps() if s not in p.steps)
    assert "block 1:" in str(p)


def test_a_rank_is_planned_for_its_part():
    model = classifier(fx.optimizer.Momentum(0.1, 0.9))
    t = fx.DistributeTranspiler("zero1").transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        program = t.get_trainer_program(1)
        ctx = RunContext(1, 2, exe.group.ranks[1].comm, {"dp": (0, 1)})
        data = [d for d in program.global_block().descs.values() if d.is_data]
        types = {d.name: d.type.with_shape((6, *d.type.shape[1:])) for d in data}
        p = plan(program, types, [], exe.scopes[1].arrays, ctx)
    assert all(p.values[d.name].type.shape[0] == 3 for d in data)
