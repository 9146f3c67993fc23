"""The proof of a plan's storage: right plans pass, and no plan that computes anything else does."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.context import RunContext
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.run.bind import bind
from fluidx.ir import TensorType
from fluidx.testing.models import classifier

L = fx.layers


def loop(name="loop"):
    """A program with a while loop and a branch, over values that also live around them."""
    main = fx.Program(name)
    with fx.unique_name.guard(), fx.program_guard(main):
        x = fx.data("x", [3, 4])
        before = L.softmax(x)
        k, s = L.fill_constant([1], "float32", 0.0), L.scale(x, 2.0)
        go = L.less_than(k, L.fill_constant([1], "float32", 4.0))
        loop = L.While(go)
        with loop.block():
            L.assign(L.softmax(s + L.transpose(L.transpose(before, [1, 0]), [1, 0])), s)
            L.increment(k, 1.0)
            L.less_than(k, L.fill_constant([1], "float32", 4.0), cond=go)
        y = L.cond(L.reduce_sum(s) > 0.0, lambda: L.tanh(s) * before, lambda: s - before)
        out = L.concat([y, L.reshape(before, [3, 4]), s], axis=0)
    return main, None, {"x": np.random.default_rng(0).standard_normal((3, 4)).astype("float32")}, [out.name]


def attention():
    """Attention between splits, transposes and a join, which its gradient makes in one value."""
    main = fx.Program("attention")
    with fx.unique_name.guard(), fx.program_guard(main):
        x = L.scale(fx.data("x", [2, 3, 12]), 0.5)
        heads = [L.transpose(L.reshape(part, [0, 0, 2, 2]), [0, 2, 1, 3]) for part in L.split(x, 3, dim=2)]
        y = L.reshape(L.transpose(L.scaled_dot_product_attention(*heads), [0, 2, 1, 3]), [0, 0, 4])
        (g,) = fx.gradients(L.reduce_sum(L.softmax(y) * y), [x])
        end = L.softmax(g + x)
    return main, None, {"x": np.random.default_rng(0).standard_normal((2, 3, 12)).astype("float32")}, [end.name]


def model(kind):
    made = classifier(fx.optimizer.Adam(1e-2), kind=kind)
    return made.main, made.startup, made.feed(6), [made.loss.name]


KINDS = ("mlp", "dropout", "norm", "batch_norm", "conv")
MODELS = {"loop": loop, "attention": attention, **{kind: lambda kind=kind: model(kind) for kind in KINDS}}


class Case:
    """A program with its inputs, which runs any plan of it from the same start."""

    def __init__(self, name, **options):
        self.main, startup, self.feed, self.fetch = MODELS[name]()
        scope = Scope()
        if startup is not None:
            fx.Executor().run(startup, scope=scope)
        self.start = {n: a.copy() for n, a in scope.arrays.items()}
        types = {n: TensorType(a.dtype.name, a.shape) for n, a in self.feed.items()}
        self.plan = plan(self.main, types, self.fetch, self.start, RunContext(), **options)

    def run(self, planned):
        """The bytes of the fetches and of all state after two runs."""
        scope = Scope()
        for n, a in self.start.items():
            scope.bind(n, a.copy())
        bound = bind(planned, scope, RunContext())
        made = [value.tobytes() for _ in range(2) for value in bound.run(self.feed)]
        return made + [scope.arrays[n].tobytes() for n in sorted(scope.arrays)]

    def goes_wrong(self, planned, right):
        try:
            return self.run(planned) != right
        except AssertionError:  # no kernel takes operands that lie so
            return True


def moved(planned, rng):
    """The plan with one buffer, or one piece of scratch, in another place of the arena."""
    places = [b.offset for b in planned.buffers if b.kind == "arena"]
    where = int(rng.choice(places))
    with_scratch = [k for k, step in enumerate(planned.steps) if step.scratch]
    if with_scratch and rng.random() < 0.3:
        k = int(rng.choice(with_scratch))
        step = planned.steps[k]
        room = planned.arena_bytes - step.scratch[0].type.nbytes
        scratch = (step.scratch[0]._replace(offset=min(where, room // 64 * 64)), *step.scratch[1:])
        return planned._replace(steps=(*planned.steps[:k], step._replace(scratch=scratch), *planned.steps[k + 1 :]))
    k = int(rng.choice([k for k, b in enumerate(planned.buffers) if b.kind == "arena"]))
    b = planned.buffers[k]
    b = b._replace(offset=min(where, (planned.arena_bytes - b.nbytes) // 64 * 64))
    return planned._replace(buffers=(*planned.buffers[:k], b, *planned.buffers[k + 1 :]))


def refused(planned):
    try:
        check_storage(planned)
    except fx.ExecutionError:
        return True
    return False


@pytest.mark.parametrize("natively", [False, None], ids=["numpy", "default"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_proof_accepts_computes_the_same(name, natively):
    case = Case(name, natively=natively)
    check_storage(case.plan)
    right = case.run(case.plan)
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(60):
        mutant = moved(case.plan, rng)
        if not refused(mutant):
            assert case.run(mutant) == right
        elif name == "loop":  # whose counter may be gone: it would never end
            wrong += 1
        else:
            wrong += case.goes_wrong(mutant, right)
    assert wrong > 0  # mutants that matter were among them


def test_the_plans_of_all_ranks_are_accepted():
    for strategy in ("data_parallel", "ring_optimizer", "zero1"):
        m = classifier(fx.optimizer.Momentum(0.1, 0.9), kind="batch_norm")
        t = fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=3)
        for rank in range(3):
            check_storage(dry_plan(t.get_trainer_program(rank), batch=7))
            check_storage(dry_plan(t.get_startup_program(rank)))


def chain():
    main = fx.Program("chain")
    with fx.unique_name.guard(), fx.program_guard(main):
        x = fx.data("x", [4, 4])
        a = L.softmax(x)
        b = L.transpose(a, [1, 0])
        c = L.matmul(a, b)
        L.elementwise_add(c, b)
    return dry_plan(main, fuse=False)


def values(planned, **changes):
    return planned._replace(values={**planned.values, **changes})


def test_what_is_wrong_is_named():
    p = chain()
    check_storage(p)
    names = [step.writes[0] for step in p.steps]
    softmax, transposed, product, total = names
    with pytest.raises(fx.ExecutionError, match=rf"step 2 \(matmul\) writes %{product} over its operand %{softmax}"):
        check_storage(values(p, **{product: p.values[product]._replace(buffer=p.values[softmax].buffer)}))
    with pytest.raises(fx.ExecutionError, match=r"makes .* a view of .*, which lies in another buffer"):
        check_storage(values(p, **{transposed: p.values[transposed]._replace(buffer=p.values[total].buffer)}))
    with pytest.raises(fx.ExecutionError, match="of an arena of 64"):
        check_storage(p._replace(arena_bytes=64))
    with pytest.raises(fx.ExecutionError, match="which nothing has written yet"):
        check_storage(p._replace(steps=p.steps[1:]))


def test_a_result_may_not_take_the_place_of_a_transposed_view():
    """The types and bytes are the same, the order of the elements is not."""
    p = chain()
    _, transposed, product, total = [step.writes[0] for step in p.steps]
    check_storage(values(p, **{total: p.values[total]._replace(buffer=p.values[product].buffer)}))
    with pytest.raises(fx.ExecutionError, match=f"writes %{total} over its operand %{transposed}"):
        check_storage(values(p, **{total: p.values[total]._replace(buffer=p.values[transposed].buffer)}))


@pytest.mark.skipif(not native.enabled(), reason=native.why_not())
def test_a_tail_may_not_write_over_what_its_operator_reads():
    """The parts of a result that are through are written while the product, and the tail of other parts, still read."""
    main = fx.Program("tail")
    with fx.unique_name.guard(), fx.program_guard(main):
        a, x, y = (L.softmax(fx.data(name, [16, 16])) for name in "axy")
        L.elementwise_add(L.matmul(x, y), a)
    p = dry_plan(main)
    step = p.steps[-1]
    assert [op.type for op in step.ops] == ["matmul", "elementwise_add"]
    check_storage(p)
    (total,) = [n for n in step.writes if n in p.values]
    for operand in step.reads:
        with pytest.raises(fx.ExecutionError, match=f"writes %{total} over its operand %{operand}"):
            check_storage(values(p, **{total: p.values[total]._replace(buffer=p.values[operand].buffer)}))


def test_what_is_made_inside_another_value_is_where_that_has_it():
    p = Case("attention").plan
    (join,) = [k for k, step in enumerate(p.steps) if step.kernel == "joined"]
    (grad,) = [k for k, step in enumerate(p.steps) if step.op.type == "scaled_dot_product_attention_grad"]
    made, whole = p.steps[grad].writes, p.steps[join].writes[0]
    first, second, third = (p.values[n] for n in made)
    lies = [v.strided for v in (first, second, third)]
    assert len({v.buffer for v in (first, second, third, p.values[whole])}) == 1

    def refuses(text, planned):
        with pytest.raises(fx.ExecutionError, match=text):
            check_storage(planned)

    swapped = values(p, **{made[0]: first._replace(strided=lies[1]), made[1]: second._replace(strided=lies[0])})
    refuses(rf"\(concat\) needs %.* at its place in %{whole}, and it is at another place", swapped)
    refuses(f"writes %{made[0]} and %{made[1]} into the same bytes", values(p, **{made[1]: second._replace(strided=lies[0])}))
    ahead = lies[1]._replace(offset=lies[1].offset - 4)
    refuses(f"writes %{made[0]} and %{made[1]} into the same bytes", values(p, **{made[1]: second._replace(strided=ahead)}))
    refuses("which are no rows", values(p, **{made[2]: third._replace(strided=lies[2]._replace(offset=lies[2].offset + 4))}))
    a, b, c, d = lies[0].strides
    for strides in ((a, b, d, c), (a, b, c, 0), (a, b, c + 4, d), (a, c, c, d), (-a, b, c, d)):
        refuses("which are no rows|into the same bytes", values(p, **{made[0]: first._replace(strided=lies[0]._replace(strides=strides))}))
    refuses("into the same bytes", values(p, **{made[0]: first._replace(strided=None)}))
    away = values(p, **{made[0]: first._replace(buffer=p.values[p.steps[0].writes[0]].buffer)})
    refuses("over its operand|another buffer", away)
    early = (*p.steps[:grad], p.steps[join], *p.steps[grad:join], *p.steps[join + 1 :])
    refuses("which nothing has written yet", p._replace(steps=early))
    softmax = next(step for step in p.steps if step.op.type == "softmax")
    between = (*p.steps[:join], softmax, *p.steps[join:])  # another result in the place of the whole
    n = softmax.writes[0]
    refuses("meanwhile", values(p._replace(steps=between), **{n: p.values[n]._replace(buffer=first.buffer)}))


def test_a_result_in_strides_must_let_its_views_be_views():
    p = Case("attention").plan
    out = next(step.writes[0] for step in p.steps if step.op.type == "scaled_dot_product_attention")
    with pytest.raises(fx.ExecutionError, match=r"\(reshape\) makes %.* a view of %.*, whose layout allows none"):
        check_storage(values(p, **{out: p.values[out]._replace(strided=None)}))


def test_what_is_on_its_way_is_left_alone_until_it_is_waited_for():
    m = classifier(fx.optimizer.SGD(0.1))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=m.main, startup_program=m.startup, trainers=2)
    p = dry_plan(t.get_trainer_program(0), batch=4)
    talks = [k for k, step in enumerate(p.steps) if step.op.type == "all_reduce"]
    assert talks
    steps = [step._replace(overlapped=k in talks, marked=k in talks) for k, step in enumerate(p.steps)]
    with pytest.raises(fx.ExecutionError, match=r"step \d+ .* before step \d+ \(all_reduce\) is waited for"):
        check_storage(p._replace(steps=tuple(steps)))
    waited = [step._replace(waits_for=max((t for t in talks if t < k), default=None)) for k, step in enumerate(steps)]
    check_storage(p._replace(steps=tuple(waited)))


def test_the_proof_runs_when_it_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr("fluidx.executor.plan.planner.check_storage", seen.append)
    monkeypatch.delenv("FLUIDX_VERIFY", raising=False)
    chain()
    assert seen == []
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    chain()
    assert len(seen) == 1
