"""Random programs, plain and with needless operators put in, run with and without the rewriting: every fetch and all state, bit by bit."""

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.feeds import check_feed, feed_types
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import Operator, TensorType, Var, flow, np_dtype, opdef
from fluidx.rewrite import rewritten, simplified
from fluidx.testing.models import classifier
from tests.mutants import programs
from tests.mutants.models.base import build
from tests.sweep import examples
from tests.transpiler import random_models

several = settings(max_examples=examples(12, 100), deadline=None, suppress_health_check=list(HealthCheck))


def run(main, startup, feeds, fetch, rewrite, natively):
    """The fetched values of each step, the state after the last, and how many operators ran."""
    scope = Scope()
    for program, fed, names in ((startup, [{}], []), (main, feeds, fetch)):
        for step, feed in enumerate(fed):
            arrays, ctx = check_feed(program, feed), RunContext()
            ctx.step = step
            planned = plan(program, feed_types(program, arrays), names, scope.arrays, ctx, natively=natively, rewrite=rewrite)
            check_storage(planned)
            values = bind(planned, scope, ctx).run(arrays)
            if program is main:
                yield values
    yield [scope.arrays[n].copy() for n in sorted(scope.arrays)]
    yield [np.array([sum(len(s.ops) for s in planned.all_steps())])]


def assert_same_bits(main, startup, feeds, fetch, natively=None):
    """Returns the number of operators without and with the rewriting."""
    text = str(main)
    plain, rewrote = (list(run(main, startup, feeds, fetch, r, natively)) for r in (False, True))
    for step, (a, b) in enumerate(zip(plain[:-1], rewrote[:-1], strict=True)):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert (x.shape, x.dtype) == (y.shape, y.dtype) and x.tobytes() == y.tobytes(), (step, k, x, y)
    assert str(main) == text
    return int(plain[-1][0][0]), int(rewrote[-1][0][0])


def some_names(rng, main, count=4):
    """Values of block 0 to fetch, the last made one among them."""
    made = [n for op in main.ops for n in op.output_arg_names if n in main.global_block().descs]
    return list(dict.fromkeys([*rng.sample(made, min(count, len(made))), made[-1]]))


def padded(main, rng):
    """A copy in which operators read copies, products with 1, two transposes and doubles of what they read, and sums of constants."""
    new = main.copy()
    block, out, names = new.global_block(), [], {}
    written = flow.definitions(main)
    body_reads = {n for op in main.ops if opdef(op.type).control.bodies for n in flow.reads(main, op)}

    def put(kind, ins, t, **attrs):
        name = f"pad{len(out)}"
        d = opdef(kind)
        slots = {s.name: tuple(v) for s, v in zip(d.in_slots, ins, strict=False)}
        out.append(Operator(kind, slots, {d.out_slots[0].name: (name,)}, d.complete_attrs(attrs)))
        block.descs[name] = Var(name, t, stop_gradient=True)
        return name

    def pad(x, t):
        kind = rng.choice(["assign", "scale", "cast", "turned", "product", "reshape", "sum", "zero", "folded"])
        if kind == "scale":
            return put("scale", [[x]], t)
        if kind == "cast":
            return put("cast", [[x]], t, dtype=t.dtype)
        if kind == "sum":
            return put("sum", [[x]], t)
        if kind == "turned" and t.ndim:
            order = tuple(reversed(range(t.ndim)))
            return put("transpose", [[put("transpose", [[x]], t.with_shape(reversed(t.shape)), axis=order)]], t, axis=order)
        if kind == "reshape" and t.shape.count(-1) < 2 and 0 not in t.shape:
            return put("reshape", [[put("reshape", [[x]], t.with_shape([-1]), shape=(-1,))]], t, shape=t.shape)
        one = TensorType(t.dtype, (1,))
        if kind == "product":
            return put("elementwise_mul", [[x], [put("fill_constant", [], one, shape=(1,), dtype=t.dtype, value=1.0)]], t)
        if kind == "zero":  # + 0 makes 0 of -0, + -0 does not
            zero = put("fill_constant", [], one, shape=(1,), dtype=t.dtype, value=rng.choice([0.0, -0.0]))
            return put("elementwise_add", [[x], [zero]], t)
        if kind == "folded":  # below 1: a value that is an id stays one
            half = put("fill_constant", [], one, shape=(1,), dtype=t.dtype, value=0.3)
            return put("elementwise_mul", [[x], [put("exp", [[put("scale", [[half]], one, scale=-1.7)]], one)]], t)
        return put("assign", [[x]], t)

    for op in main.ops:
        op = op.renamed(names)
        out.append(op)
        if opdef(op.type).control.bodies:
            continue
        if rng.random() < 0.1 and all(len(written[n]) == 1 for n in op.output_arg_names) and op.output_arg_names:
            twin = {n: f"{n}.twin{len(out)}" for n in op.output_arg_names}
            out.append(op.replace(outputs={s: tuple(twin[n] for n in ns) for s, ns in op.outputs.items()}, role_var=()))
            for n, other in twin.items():
                block.descs[other] = block.descs[n].changed(name=other, persistable=False)
                if n not in body_reads and not block.descs[n].persistable:
                    names[n] = other
        for n in op.output_arg_names:
            d = block.descs.get(n)
            free = d is not None and len(written[n]) == 1 and not d.persistable and n not in body_reads and d.type.is_float
            if free and rng.random() < 0.3:
                names[n] = pad(names.get(n, n), d.type)
    block.oplist = out
    return new


@several
@given(st.integers(0, 2**32), st.sampled_from(["net", "exact"]), st.booleans())
def test_random_nets(number, kind, natively):
    rng = Random(number)
    model = build(f"{kind}{number}", lambda: getattr(programs, kind)(rng))
    feeds = [model.feed(6, step) for step in range(3)]
    assert_same_bits(model.main, model.startup, feeds, some_names(rng, model.main), None if natively else False)


@several
@given(st.integers(0, 2**32), st.sampled_from(["net", "exact"]), st.booleans())
def test_random_nets_with_needless_operators(number, kind, natively):
    rng = Random(number)
    model = build(f"{kind}{number}", lambda: getattr(programs, kind)(rng))
    main = padded(model.main, rng)
    feeds = [model.feed(6, step) for step in range(3)]
    fetch = some_names(rng, main)
    before, after = assert_same_bits(main, model.startup, feeds, fetch, None if natively else False)
    assert after <= before
    once = simplified(main, fetch)
    assert simplified(once, fetch) == once
    assert rewritten(once, fetch=fetch) == rewritten(rewritten(once, fetch=fetch), fetch=fetch)


@several
@given(random_models.recipes, st.integers(0, 2**32), st.booleans())
def test_random_models_with_needless_operators(recipe, number, natively):
    rng, model = Random(number), random_models.build(recipe)
    main = padded(model.main, rng)
    assert_same_bits(main, model.startup, [model.feed(5, k) for k in range(3)], some_names(rng, main), None if natively else False)


@pytest.mark.parametrize("kind", ["mlp", "dropout", "norm", "batch_norm", "conv"])
@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "ring_optimizer"])
def test_rank_programs_give_the_same_bits_with_and_without(kind, strategy, monkeypatch):
    found = []
    for switch in "01":
        monkeypatch.setenv("FLUIDX_REWRITE", switch)
        model = classifier(kind=kind)
        t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=3)
        with fx.ParallelExecutor(t, places=fx.cpu_places(3), timeout=20) as exe:
            exe.run_startup()
            values = [exe.run(feed=model.feed(7, k), fetch_list=[model.loss]) for k in range(3)]
            state = [exe.state(n) for n, d in model.main.global_block().descs.items() if d.persistable]
        found.append([a.tobytes() for a in (*(v for step in values for v in step), *state)])
    assert found[0] == found[1]


@pytest.mark.parametrize("natively", [None, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_constants_of_16_bits_are_rounded_where_a_run_rounds_them(dtype, natively):
    main = fx.Program("halves")
    with fx.program_guard(main, fx.Program("startup")):
        a = fx.layers.fill_constant([3], dtype, 0.1)
        b = fx.layers.exp(a) * 0.3 + fx.layers.reduce_sum(a)
        y = fx.layers.elementwise_add(fx.data("x", [3], dtype), b)
    x = np.array([1.0, -0.3, 5.0]).astype(np_dtype(dtype))
    before, after = assert_same_bits(main, fx.Program("nothing"), [{"x": x}], [b.name, y.name], natively)
    assert after < before
