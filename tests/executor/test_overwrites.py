"""The proof of a plan's storage: right plans pass, and no plan that computes anything else does."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.executor.bind import bind
from fluidx.executor.context import RunContext
from fluidx.executor.dry import dry_plan
from fluidx.executor.overwrites import check_storage
from fluidx.executor.planning import plan
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


def model(kind):
    made = classifier(fx.optimizer.Adam(1e-2), kind=kind)
    return made.main, made.startup, made.feed(6), [made.loss.name]


MODELS = {"loop": loop, **{kind: lambda kind=kind: model(kind) for kind in ("mlp", "dropout", "norm", "batch_norm", "conv")}}


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


def test_what_is_on_its_way_is_left_alone_until_it_is_waited_for():
    m = classifier(fx.optimizer.SGD(0.1))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=m.main, startup_program=m.startup, trainers=2)
    p = dry_plan(t.get_trainer_program(0), batch=4)
    talks = [k for k, step in enumerate(p.steps) if step.op.type == "all_reduce"]
    assert talks
    steps = [step._replace(marked=k in talks) for k, step in enumerate(p.steps)]
    with pytest.raises(fx.ExecutionError, match=r"step \d+ .* before step \d+ \(all_reduce\) is waited for"):
        check_storage(p._replace(steps=tuple(steps)))
    waited = [step._replace(waits_for=max((t for t in talks if t < k), default=None)) for k, step in enumerate(steps)]
    check_storage(p._replace(steps=tuple(waited)))


def test_the_proof_runs_when_it_is_asked_for(monkeypatch):
    seen = []
    monkeypatch.setattr("fluidx.executor.planning.check_storage", seen.append)
    monkeypatch.delenv("FLUIDX_VERIFY", raising=False)
    chain()
    assert seen == []
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    chain()
    assert len(seen) == 1
