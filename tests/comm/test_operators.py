"""The operators that communicate, on ranks: what they do to the value that all ranks hold together, and their gradients."""

from functools import reduce as fold

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.ir import OPS, At, Effect, Partial, Pieces, ProgramError, Shard, opdef
from fluidx.ir.parts import cut, join, local_shape
from fluidx.testing import each_rank, numeric_grad, run_ranks
from fluidx.testing.reference import run_op
from tests.each import each
from tests.sweep import ALL

SHAPE = (5, 7, 6)


def ranges(n):
    """Flat ranges of SHAPE's elements, the second of them empty."""
    return tuple({1: (0, 210), 2: (0, 210, 210), 3: (0, 17, 17, 210), 4: (0, 50, 50, 63, 210)}[n])


def cases(n):
    """(operator, attributes, the entry before) for n ranks."""
    last = n - 1
    for op in ("sum", "max", "min"):
        yield "all_reduce", {"op": op}, Partial(op)
        yield "reduce", {"op": op, "root": last}, Partial(op)
        yield "reduce_scatter", {"op": op, "axis": 1}, Partial(op)
        yield "reduce_scatter", {"op": op, "bounds": ranges(n)}, Partial(op)
    for before in (None, At(last)):
        yield "broadcast", {"root": last}, before
        yield "own_term", {"root": last}, before
    for axis, unit in ((0, 1), (1, 1), (1, 3), (2, 2)):
        yield "reduce_scatter", {"axis": axis, "unit": unit}, Partial("sum")
        for name in ("all_gather", "pad_part"):
            yield name, {"axis": axis, "unit": unit}, Shard(axis, "dp", unit)
        yield "gather_parts", {"axis": axis, "unit": unit, "root": last}, Shard(axis, "dp", unit)
        yield "scatter_parts", {"axis": axis, "unit": unit, "root": last}, At(last)
        yield "part", {"axis": axis, "unit": unit}, None
    for name in ("all_gather", "pad_part"):
        yield name, {"bounds": ranges(n)}, Pieces(ranges(n))
    yield "part", {"bounds": ranges(n)}, None
    yield "gather_parts", {"bounds": ranges(n), "root": 0}, Pieces(ranges(n))
    yield "scatter_parts", {"bounds": ranges(n), "root": 0}, At(0)
    for a, u, b, v in ((0, 1, 1, 1), (1, 3, 0, 2), (2, 1, 1, 1)):
        yield "all_to_all", {"axis": a, "unit": u, "to_axis": b, "to_unit": v}, Shard(a, "dp", u)


COUNTS = (1, 2, 3, 4) if ALL else (1, 3)
every_count = pytest.mark.parametrize("n", [1, 2, 3, 4])
every_case = each("n, name, attrs, before", [(n, *c) for n in COUNTS for c in cases(n)])


def test_every_operator_that_communicates_is_tried():
    here = {name for name, _, _ in cases(2)}
    lowered = {"transfer"}  # becomes a send and a recv before it runs
    elsewhere = {"nccl_init", "barrier", "send", "recv"}  # below
    elsewhere |= {"sparse_all_reduce", "adasum_reduce"}  # of what ranks have of their own: test_dgc.py and test_adasum.py of the transpiler
    elsewhere |= {"push", "pull"}  # between trainers and servers: test_servers.py of the transpiler
    mine = {d.name for d in OPS.values() if d.__module__.startswith("fluidx.ops.comm.")}
    acting = {name for name in mine if OPS[name].effect in (Effect.COLLECTIVE, Effect.P2P)}
    moving = {name for name in mine if OPS[name].comm.move is not None}
    assert acting | moving == here | lowered | elsewhere


# -- running operators on the parts that ranks hold ------------------------------------------------------------------------------


def full(name, attrs):
    return opdef(name).complete_attrs({"group": "dp", **attrs})


def placed(entry):
    return () if entry is None else (entry,)


def lands(op):
    """The entry of what an operator makes: that of the one entry which it takes."""
    attrs = {**op.attrs, "op": "sum"} if op.attrs.get("op") in ("avg", "prod") else op.attrs
    cuts = [Shard(attrs.get("axis", 0), "dp", attrs.get("unit", 1)), Pieces(tuple(attrs.get("bounds", ())))]
    for entry in (None, Partial(attrs.get("op", "sum")), At(attrs.get("root", 0)), *cuts):
        try:
            return opdef(op.type).comm.move(entry, **attrs)
        except ProgramError:
            continue
    raise AssertionError(op)


def run_parts(program, n, feeds):
    """Every value by name, on each of n ranks that feed their parts; results of communication have the shape of the rank's part."""

    def job(comm):
        env = dict(feeds[comm.rank])
        ctx = RunContext(comm.rank, n, comm, {"dp": tuple(range(n))})
        for op in program.ops:
            definition, outs = opdef(op.type), None
            ins = definition.arrange({slot: [env[k] for k in names] for slot, names in op.inputs.items()})
            (name,) = op.output_arg_names
            if definition.comm.move is not None:
                shape = local_shape(program.global_block().desc(name).type.shape, placed(lands(op)), {"dp": (comm.rank, n)})
                outs = [np.full(shape, 77, ins[0].dtype)]
            env[name] = run_op(definition, ins, op.attrs, ctx, outs=outs)[0]
        return env

    return each_rank(n, job)


def program_of(n, build, dtype="float64"):
    p = fx.Program("ranks")
    p.groups = {"dp": (tuple(range(n)),)}
    with fx.unique_name.guard(), fx.program_guard(p, fx.Program()):
        x = fx.data("x", SHAPE, dtype)
        y = build(fx.ir.Builder(p.global_block()), x)
    return p, x, y


def shares(whole, entry, n, rng):
    """What n ranks hold of a value, with something else wherever the placement leaves a rank free."""
    if isinstance(entry, Partial) and entry.op == "sum":
        terms = [rng.integers(-4, 5, whole.shape).astype(whole.dtype) for _ in range(n - 1)]
        return [*terms, whole - fold(np.add, terms, np.zeros_like(whole))]
    if isinstance(entry, Partial):
        worse = -1 if entry.op == "max" else 1
        holder = rng.integers(0, n, whole.shape)
        return [np.where(holder == r, whole, whole + worse * rng.integers(0, 5, whole.shape)).astype(whole.dtype) for r in range(n)]
    if isinstance(entry, At):
        return [whole if r == entry.root else np.full_like(whole, 55) for r in range(n)]
    return [np.ascontiguousarray(cut(whole, placed(entry), {"dp": (r, n)})) for r in range(n)]


@every_case
def test_communication_moves_a_value_and_keeps_it(n, name, attrs, before):
    after = opdef(name).comm.move(before, **full(name, attrs))
    for dtype in ("float32", "int64"):
        rng = np.random.default_rng(n)
        whole = rng.integers(-9, 10, SHAPE).astype(dtype)
        p, _, y = program_of(n, lambda b, x: getattr(b, name)(x, group="dp", **attrs), dtype)
        assert y.shape == SHAPE and y.dtype == dtype  # types are global
        found = [env[y.name] for env in run_parts(p, n, [{"x": x} for x in shares(whole, before, n, rng)])]
        assert np.array_equal(join(found, placed(after), p.groups, SHAPE), whole)
        if after is None:
            assert all(np.array_equal(f, whole) for f in found)
        for r, f in enumerate(found):
            assert f.shape == local_shape(SHAPE, placed(after), {"dp": (r, n)})


@every_count
def test_means_and_products(n):
    rng = np.random.default_rng(0)
    terms = [rng.integers(1, 3, SHAPE).astype("float64") for _ in range(n)]
    for op, want in (("avg", sum(terms) / n), ("prod", fold(np.multiply, terms))):
        for name, attrs in (("all_reduce", {}), ("reduce", {"root": 0}), ("reduce_scatter", {"axis": 2})):
            p, _, y = program_of(n, lambda b, x, name=name, attrs=attrs, op=op: getattr(b, name)(x, group="dp", op=op, **attrs))
            found = [env[y.name] for env in run_parts(p, n, [{"x": t} for t in terms])]
            if name == "reduce_scatter":
                found = [np.concatenate(found, 2)]
            assert np.array_equal(found[0], want)


# -- gradients ---------------------------------------------------------------------------------------------------------------------


def linear_cases(n):
    for name, attrs, before in cases(n):
        if attrs.get("op", "sum") == "sum":
            yield name, attrs, before
    means = ("all_reduce", {}), ("reduce", {"root": n - 1}), ("reduce_scatter", {"axis": 1}), ("reduce_scatter", {"bounds": ranges(n)})
    for name, attrs in means:
        yield name, {**attrs, "op": "avg"}, Partial("sum")


def inner(a, b, entry):
    """The inner product of what the ranks hold; a value at a root counts there alone."""
    return sum(float((x * y).sum()) for r, (x, y) in enumerate(zip(a, b, strict=True)) if not isinstance(entry, At) or r == entry.root)


@each("n, name, attrs, before", [(n, *c) for n in COUNTS for c in linear_cases(n)])
def test_a_gradient_is_the_adjoint_of_its_operator(n, name, attrs, before):
    """<w, A x> = <A'w, x> over all ranks, for whatever the ranks hold: the derivative of the sum of their losses by what each holds."""
    p, x, y = program_of(n, lambda b, x: getattr(b, name)(x, group="dp", **attrs))
    after = lands(p.ops[-1])
    with fx.program_guard(p, fx.Program()):
        w = fx.data("w", SHAPE, "float64")
        (g,) = fx.gradients([y], [x], [w])
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def some(entry, rng=rng):
            return [rng.integers(-9, 10, local_shape(SHAPE, placed(entry), {"dp": (r, n)})).astype("float64") for r in range(n)]

        xs, ws = some(before), some(after)
        envs = run_parts(p, n, [{"x": a, "w": b} for a, b in zip(xs, ws, strict=True)])
        left, right = inner(ws, [e[y.name] for e in envs], after), inner([e[g.name] for e in envs], xs, before)
        assert left == right or (attrs.get("op") == "avg" and left == pytest.approx(right, rel=1e-12))
        if name == "broadcast":
            assert all(not e[g.name].any() for r, e in enumerate(envs) if r != attrs["root"])


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
def test_reductions_that_are_not_linear_have_no_gradient(name, op):
    attrs = {"root": 0} if name == "reduce" else {}
    p, x, y = program_of(2, lambda b, x: getattr(b, name)(x, group="dp", op=op, **attrs))
    with pytest.raises(ProgramError, match=f"{name} of op='{op}' has no gradient; 'sum' and 'avg' have"):
        fx.gradients([y], [x])


CHAINS = {
    "zero": lambda b, x: b.all_gather(b.square(b.reduce_scatter(b.square(x), group="dp", axis=1)), group="dp", axis=1),
    "there and back": lambda b, x: b.all_reduce(b.pad_part(b.square(b.part(x, group="dp", axis=2)), group="dp", axis=2), group="dp"),
    "heads": lambda b, x: b.all_gather(
        b.square(b.all_to_all(b.part(x, group="dp"), group="dp", to_axis=1, to_unit=2)), group="dp", axis=1, unit=2
    ),
    "root": lambda b, x: b.broadcast(b.square(b.reduce(b.square(x), group="dp", root=1)), group="dp", root=1),
}


@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS.keys())
def test_the_gradient_through_several_operators(build):
    n = 3
    p, x, y = program_of(n, build)
    with fx.program_guard(p, fx.Program()):
        w = fx.data("w", SHAPE, "float64")
        (g,) = fx.gradients([y], [x], [w])
    rng = np.random.default_rng(0)
    xs, ws = rng.standard_normal((2, n, *SHAPE))

    def loss(_):
        forward = program_of(n, build)[0]
        envs = run_parts(forward, n, [{"x": v} for v in xs])
        return sum(float((e[y.name] * v).sum()) for e, v in zip(envs, ws, strict=True))

    found = np.stack([e[g.name] for e in run_parts(p, n, [{"x": a, "w": b} for a, b in zip(xs, ws, strict=True)])])
    for _ in range(5):  # along random directions: there are too many elements for each
        direction = rng.standard_normal(xs.shape)
        start = xs.copy()

        def along(t, start=start, direction=direction):
            xs[...] = start + t[0] * direction
            return loss(None)

        t = np.zeros(1)
        want = numeric_grad(along, t)[0]
        xs[...] = start
        assert (found * direction).sum() == pytest.approx(want, rel=1e-5)


# -- through the executor ----------------------------------------------------------------------------------------------------------

SAME_SHAPE = {
    "all_reduce": lambda b, x: b.all_reduce(x, group="dp", op="sum"),
    "all_reduce avg": lambda b, x: b.all_reduce(x, group="dp", op="avg"),
    "broadcast": lambda b, x: b.broadcast(x, group="dp", root=1),
    "own_term": lambda b, x: b.all_reduce(b.own_term(x, group="dp", root=1), group="dp"),
}


@pytest.mark.parametrize("build", SAME_SHAPE.values(), ids=SAME_SHAPE.keys())
def test_programs_on_ranks_give_the_derivative_of_the_sum_of_their_losses(build):
    n = 3
    p = fx.Program("ranks")
    p.groups = {"dp": (tuple(range(n)),)}
    with fx.program_guard(p, fx.Program()):
        x, w = fx.data("x", [2, 3], "float64"), fx.data("w", [2, 3], "float64")
        loss = fx.layers.reduce_sum(fx.layers.square(build(fx.ir.Builder(p.global_block()), x)) * w)
        (g,) = fx.gradients([loss], [x])
    xs, ws = np.random.default_rng(0).standard_normal((2, n, 2, 3))

    def feeds():
        return [{"x": a, "w": b} for a, b in zip(xs, ws, strict=True)]

    found = np.stack([r[0] for r in run_ranks([p] * n, feeds(), [g])])
    want = numeric_grad(lambda _: float(sum(r[0].item() for r in run_ranks([p] * n, feeds(), [loss]))), xs)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-7)


@every_case
def test_plans_of_rank_programs_move_a_value_and_keep_it(n, name, attrs, before):
    """The executor deals the value by its placement; terms of a sum and what lies at a root are made from it first."""
    if isinstance(before, Partial) and before.op != "sum":
        return
    fed = before if isinstance(before, (Shard, Pieces)) else None
    p = fx.Program("ranks")
    p.groups = {"dp": (tuple(range(n)),)}
    block = p.global_block()

    def place(v, entry):
        block.descs[v.name] = block.descs[v.name].changed(placement=placed(entry))
        return v

    with fx.program_guard(p, fx.Program()):
        x = place(fx.data("x", SHAPE, "float32"), fed)
        b = fx.ir.Builder(block)
        if isinstance(before, (Partial, At)):
            x = place(b.own_term(x, group="dp", root=n - 1), Partial("sum"))
        if isinstance(before, At):
            x = place(b.reduce(x, group="dp", root=before.root), before)
        after = opdef(name).comm.move(before, **full(name, attrs))
        y = place(getattr(b, name)(x, group="dp", **attrs), after)
    whole = np.random.default_rng(n).integers(-9, 10, SHAPE).astype("float32")
    found = [r[0] for r in run_ranks([p] * n, {"x": whole}, [y])]
    assert np.array_equal(join(found, placed(after), p.groups, SHAPE), whole)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("size", [5, 40_000])
def test_values_go_round_by_send_and_recv(n, size):
    programs = []
    for r in range(n):
        p = fx.Program("ranks")
        p.groups = {"dp": (tuple(range(n)),)}
        with fx.program_guard(p, fx.Program()):
            x = fx.data("x", [size], "float32")
            b = fx.ir.Builder(p.global_block())
            b.send(x, peer=(r + 1) % n, group="dp", batch="round")
            came = b.recv(peer=(r - 1) % n, shape=(size,), group="dp", batch="round", name="came")
            b.elementwise_add(x, came, name="both")
            b.barrier(group="dp")
        programs.append(p)
    found = run_ranks(programs, [{"x": np.full(size, 2.0**r, "float32")} for r in range(n)], ["came", "both"])
    for r, (came, both) in enumerate(found):
        assert np.all(came == 2.0 ** ((r - 1) % n)) and np.all(both == came + 2.0**r)


def test_a_group_is_made_once_and_then_used():
    p = fx.Program("ranks")
    p.groups = {"dp": ((0, 1),)}
    with fx.program_guard(p, fx.Program()):
        x = fx.data("x", [1], "float32")
        b = fx.ir.Builder(p.global_block())
        b.nccl_init(group="dp")
        y = b.all_reduce(x, group="dp")
    assert [r[0].tolist() for r in run_ranks([p, p], [{"x": np.float32([1])}, {"x": np.float32([2])}], [y])] == [[3], [3]]


# -- what is refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, attrs, before, said",
    [
        ("all_reduce", {}, None, r"op all_reduce takes partial\(sum\) over dp, not replicate"),
        ("all_reduce", {"op": "max"}, Partial("sum"), r"op all_reduce takes partial\(max\) over dp, not partial\(sum\) over dp"),
        ("all_reduce", {"op": "avg"}, Partial("sum"), "all_reduce of op avg is no redistribution"),
        ("reduce", {"op": "avg", "root": 0}, Partial("sum"), "reduce of op avg is no redistribution"),
        ("reduce_scatter", {"op": "prod"}, Partial("sum"), "reduce_scatter of op prod is no redistribution"),
        ("broadcast", {"root": 1}, At(0), r"op broadcast takes at\(1\) over dp or replicate, not at\(0\) over dp"),
        ("all_gather", {"axis": 1}, Shard(0), r"op all_gather takes shard\(1\) over dp, not shard\(0\) over dp"),
        ("all_gather", {"bounds": (0, 3, 5)}, Pieces((0, 2, 5)), r"op all_gather takes pieces\(0, 3, 5\) over dp, not pieces\(0, 2, 5\)"),
        ("all_to_all", {"to_axis": 1}, None, r"op all_to_all takes shard\(0\) over dp, not replicate"),
        ("part", {}, Partial("sum"), r"op part takes replicate, not partial\(sum\) over dp"),
        ("own_term", {}, At(1), r"op own_term takes at\(0\) over dp or replicate, not at\(1\) over dp"),
    ],
)
def test_a_move_from_elsewhere_is_refused(name, attrs, before, said):
    with pytest.raises(ProgramError, match=said):
        opdef(name).comm.move(before, **full(name, attrs))


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda b, x: b.all_gather(x, group="dp", axis=3), r"op all_gather: axis 3 in blocks of 1 does not shard f64\[5,7,6\]"),
        (lambda b, x: b.part(x, group="dp", unit=0), r"op part: axis 0 in blocks of 0 does not shard f64\[5,7,6\]"),
        (lambda b, x: b.reduce_scatter(x, group="dp", bounds=(0, 9)), r"op reduce_scatter: bounds \[0, 9\] do not partition"),
        (lambda b, x: b.pad_part(x, group="dp", bounds=(0, 9, 7, 210)), r"op pad_part: bounds \[0, 9, 7, 210\] do not partition"),
        (lambda b, x: b.all_to_all(x, group="dp", axis=1, to_axis=1), "all_to_all moves a shard from one axis to another; both are 1"),
    ],
)
def test_cuts_that_are_none_are_refused_where_they_are_written(build, said):
    with pytest.raises(ProgramError, match=said):
        program_of(2, build)


def test_bounds_for_another_number_of_ranks_are_refused():
    p, _, _ = program_of(2, lambda b, x: b.part(x, group="dp", bounds=(0, 5, 9, 210)))
    ctx = RunContext(0, 2, None, {"dp": (0, 1)})
    with pytest.raises(ProgramError, match=r"bounds \[0, 5, 9, 210\] give 3 ranges; the group has 2 ranks"):
        run_op(opdef("part"), [np.zeros(SHAPE)], p.ops[0].attrs, ctx)


def test_a_redistribute_is_an_identity_that_does_not_run():
    p, x, y = program_of(2, lambda b, x: b.scale(b.redistribute(x, reason="matmul wants rows"), scale=2.0))
    with fx.program_guard(p, fx.Program()):
        (g,) = fx.gradients([y], [x])
    assert [op.type for op in p.ops].count("redistribute") == 1  # the gradient lies as its value does
    with pytest.raises(ProgramError, match="redistribute is a placeholder for communication"):
        run_ranks([p] * 2, [{"x": np.zeros(SHAPE)}] * 2, [g, y])
    assert opdef("redistribute").effect is Effect.PURE


@every_count
def test_a_part_can_be_a_view(n):
    definition = opdef("part")
    x = np.arange(210.0).reshape(SHAPE)
    for r in range(n):
        ctx = RunContext(r, n, None, {"dp": tuple(range(n))})
        for attrs, entry in (({"axis": 1, "unit": 2}, Shard(1, "dp", 2)), ({"bounds": ranges(n)}, Pieces(ranges(n)))):
            seen = definition.view_of(x, ctx, full("part", attrs))
            assert seen.size == 0 or np.shares_memory(seen, x)
            assert np.array_equal(seen, cut(x, (entry,), {"dp": (r, n)}))
        assert definition.view_of(x.transpose(), ctx, full("part", {"bounds": ranges(n)})) is None
    assert opdef("relu").view_of(x, ctx, {}) is None and opdef("reshape").view_of(x, ctx, {"shape": (210,)}).shape == (210,)


def test_values_that_are_views_are_packed_and_unpacked_anew_in_each_run():
    p = fx.Program("packing")
    with fx.program_guard(p, fx.Program()):
        x = fx.data("x", [2, 3], "float32")
        b = fx.ir.Builder(p.global_block())
        flat = b.pack([fx.layers.transpose(x, [1, 0]), x])
        (apart,) = b.unpack([fx.layers.transpose(x, [1, 0])], shapes=((6,),), n_out=1)
        part = b.chunk(fx.layers.transpose(x, [1, 0]), start=1, stop=4)
    exe = fx.Executor(fx.CPUPlace())
    for k in range(2):
        value = np.arange(6, dtype="float32").reshape(2, 3) + 10 * k
        found = exe.run(p, feed={"x": value}, fetch_list=[flat, apart, part])
        want = value.T.ravel()
        assert [f.tolist() for f in found] == [[*want, *value.ravel()], want.tolist(), want[1:4].tolist()]


def test_packing_is_linear_and_keeps_its_place():
    from fluidx.ir import TensorType
    from fluidx.ir.rows import find_row, rows

    a, b, flat = TensorType("float32", (4, 3)), TensorType("float32", (5,)), TensorType("float32", (17,))
    shapes, part = {"shapes": ((4, 3), (5,))}, {"start": 1, "stop": 6}
    lines = [("pack", [a, b], [flat], {}), ("unpack", [flat], [a, b], shapes), ("chunk", [a], [b], part)]
    for name, ins, outs, attrs in lines:
        p = opdef(name).pattern_of(ins, outs, attrs)
        table = rows(p)

        def allowed(before, after, p=p, table=table, ins=ins, outs=outs):
            return find_row(table, p, [before] * len(ins), [after] * len(outs), [*ins, *outs], "dp", 2) is not None

        for entry in (None, Partial("sum"), At(1)):
            assert allowed(entry, entry), (name, entry)
        assert not allowed(Shard(0), Shard(0)) and not allowed(Partial("sum"), None) and not allowed(At(1), At(0))
        assert not allowed(Pieces((0, 6, 12)), Pieces((0, 6, 12)))
        assert allowed(Partial("max"), Partial("max")) is (name == "chunk")
    mixed = opdef("pack").pattern_of([a, b], [flat], {})
    assert find_row(rows(mixed), mixed, [Partial("sum"), None], [Partial("sum")], [a, b, flat], "dp", 2) is None
