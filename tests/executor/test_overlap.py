"""Communication of CPU ranks on a second thread: what is answered stays the same, whatever the two threads do first."""

from functools import partial

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan import overlap
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.executor.ranks.shared_plans import SharedPlans
from fluidx.executor.run import bind
from fluidx.executor.run.thread_calls import WAITS
from fluidx.ir import ProgramPair
from fluidx.testing.models import classifier

STRATEGIES = (
    "data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp",
    fx.strategies.data_parallel(algorithm="ring"), fx.strategies.zero1(algorithm="ring"),
)  # fmt: skip
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


class LateTurns:
    """Steps beside compute happen on the thread that computes, when it waits for them and not before: as late as a plan allows."""

    def __init__(self, ctx, bound):
        self.compute, self.pending = bound.compute, []

    def start(self, k, step, call):
        self.compute.add(step.op, partial(self.pending.append, (k, call)), k)

    def wait(self, op, k):
        self.compute.add(op, partial(self.up_to, k), WAITS)

    def up_to(self, k):
        while self.pending and self.pending[0][0] <= k:
            _, call = self.pending.pop(0)
            if call is not None:
                call()


def on(monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", "1")


def model(kind="mlp", optimizer=None):
    """Of small integers, so that sums are exact in any order."""
    return classifier(optimizer or fx.optimizer.Momentum(0.1, 0.9), kind=kind)


def transpiled(m, strategy, n=3):
    return fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=n)


def steps(m, t, count=3, rows=7, n=3):
    """The losses of some steps and the parameters behind them."""
    with fx.ParallelExecutor(t, places=fx.cpu_places(n), timeout=20) as exe:
        exe.run_startup()
        losses = [exe.run(feed=m.feed(rows, k), fetch_list=[m.loss])[0] for k in range(count)]
        ready = next(reversed(exe._ready.values()))
        call_lists = [len(b.call_lists) for b in ready.step.bounds]
        return [*losses, *(exe.state(p) for p, _ in m.gradients)], call_lists, ready.step.launch is not None


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kernels", ["auto", "numpy"])
@each_strategy
def test_a_second_thread_changes_no_bit(strategy, kernels, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", kernels)
    m = model("norm", fx.optimizer.Adam(0.01))
    t = transpiled(m, strategy)
    monkeypatch.setenv("FLUIDX_OVERLAP", "0")
    want, call_lists, launched = steps(m, t)
    assert call_lists == [1, 1, 1]
    on(monkeypatch)
    found, call_lists, as_before = steps(m, t)
    assert call_lists == [2, 2, 2] and as_before == launched
    assert same(found, want)


@each_strategy
def test_steps_as_late_as_a_plan_allows_give_the_same_bits(strategy, monkeypatch):
    """A missing wait, or memory that is taken too early, gives other numbers."""
    m = model("norm", fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)))
    t = transpiled(m, strategy)
    want, _, _ = steps(m, t)
    on(monkeypatch)
    monkeypatch.setattr(bind, "Threads", LateTurns)
    found, _, _ = steps(m, t)
    assert same(found, want)


def test_rank_programs_read_back_from_text_overlap_too(monkeypatch):
    m = model()
    t = transpiled(m, "data_parallel")
    want, _, _ = steps(m, t)
    on(monkeypatch)
    texts = [(t.get_trainer_program(r).to_string(), t.get_startup_program(r).to_string()) for r in range(3)]
    read = [ProgramPair(*map(fx.Program.parse_from_string, pair)) for pair in texts]
    found, call_lists, _ = steps(m, read)
    assert call_lists == [2, 2, 2] and same(found, want)


def test_one_rank_has_one_thread(monkeypatch):
    on(monkeypatch)
    m = model()
    _, call_lists, _ = steps(m, transpiled(m, "data_parallel", 1), n=1)
    assert call_lists == [1]


# -- when it is used ---------------------------------------------------------------------------------------------------------


def test_auto_takes_second_threads_where_each_rank_has_two_cores(monkeypatch):
    monkeypatch.delenv("FLUIDX_OVERLAP", raising=False)
    monkeypatch.setattr(overlap.native, "cores", lambda: 8)
    assert [overlap.least_hidden(n) is not None for n in (1, 2, 4, 5, 8)] == [False, True, True, False, False]
    monkeypatch.setenv("FLUIDX_OVERLAP", "1")
    assert [overlap.least_hidden(n) for n in (1, 2, 64)] == [None, 0, 0]
    monkeypatch.setenv("FLUIDX_OVERLAP", "0")
    assert [overlap.least_hidden(n) for n in (1, 2)] == [None, None]


def rank_plan(strategy="data_parallel", kind="mlp", least=0, rows=4):
    m = model(kind)
    return dry_plan(transpiled(m, strategy).get_trainer_program(0), batch=rows, overlap=least)


def test_a_plan_overlaps_only_what_is_worth_it():
    small = rank_plan(least=1 << 20)
    assert not any(s.overlapped for s in small.steps) and small.waits_at_end is None
    assert any(s.overlapped for s in rank_plan(least=0).steps)


def test_compute_behind_the_first_reduction_runs_before_the_update_waits():
    """Gradients are made from the last layer to the first; every all_reduce starts at once, and the first update waits for the last one,
    which it reads."""
    p = rank_plan(fx.strategies.data_parallel(bucket_mb=0))
    talks = [k for k, s in enumerate(p.steps) if s.op.type == "all_reduce"]
    assert [k for k, s in enumerate(p.steps) if s.overlapped] == talks
    waits = {k: s.waits_for for k, s in enumerate(p.steps) if s.waits_for is not None}
    first = next(k for k, s in enumerate(p.steps) if s.op.type == "momentum")
    assert min(waits) == first and "matmul" in [s.op.type for s in p.steps[talks[0] : first]]


def test_what_a_transpiler_puts_behind_a_message_follows_it():
    """Sums of a ring run behind the receive that they wait for; packing, which waits for none, is computed."""
    p = rank_plan("ring_optimizer")
    at = {s.op.type: s.overlapped for s in p.steps if s.kernel != "view"}
    assert at["sum"] and not at["pack"] and not at["momentum"]


def test_a_ring_written_out_of_messages_runs_beside_compute_as_a_whole():
    """Hops wait for hops, and compute for none of them before the first update."""
    p = rank_plan(fx.strategies.data_parallel(bucket_mb=0, algorithm="ring"))
    talks = [k for k, s in enumerate(p.steps) if s.kernel == "exchange"]
    first = next(k for k, s in enumerate(p.steps) if s.op.type == "momentum")
    assert min(k for k, s in enumerate(p.steps) if s.waits_for is not None) >= first
    assert {s.op.type for s in p.steps[talks[0] : first] if not s.overlapped} >= {"matmul"}


# -- the proof ---------------------------------------------------------------------------------------------------------------


def mutants(p):
    """Plans with one wait missing or too late, one step on the wrong thread, or one that does not say when it is through."""

    def changed(p, k, **fields):
        return p._replace(steps=(*p.steps[:k], p.steps[k]._replace(**fields), *p.steps[k + 1 :]))

    for k, s in enumerate(p.steps):
        if s.waits_for is not None:
            without = changed(p, k, waits_for=None)
            yield without
            if k + 1 < len(p.steps) and p.steps[k + 1].waits_for is None:
                yield changed(without, k + 1, waits_for=s.waits_for)
            earlier = [j for j, other in enumerate(p.steps[: s.waits_for]) if other.marked]
            yield from (changed(p, k, waits_for=j) for j in earlier[-1:])
        if s.marked:
            yield changed(p, k, marked=False)
        if s.overlapped:
            yield changed(p, k, overlapped=False)
    yield p._replace(waits_at_end=None)


def refused(p):
    try:
        check_storage(p)
    except fx.ExecutionError:
        return True
    return False


@each_strategy
def test_plans_that_wait_too_little_are_refused(strategy, monkeypatch):
    """Each mutant that the proof accepts gives, with every step as late as it allows, what the plan gives."""
    on(monkeypatch)
    m = model("norm")
    t = transpiled(m, strategy, 2)
    monkeypatch.setattr(bind, "Threads", LateTurns)
    want, _, _ = steps(m, t, 2, n=2)
    plans, real = [], SharedPlans.plan
    monkeypatch.setattr(SharedPlans, "plan", lambda *args, **options: plans.append(real(*args, **options)) or plans[-1])
    steps(m, t, 1, n=2)
    one = next(p for p in plans if p.program.rank == 0 and any(s.overlapped for s in p.steps))
    check_storage(one)
    found = [refused(p) for p in mutants(one)]
    assert sum(found) > len(found) // 2
    accepted = [p for p, no in zip(mutants(one), found, strict=True) if not no]
    for mutant in accepted:
        def instead(shared, program, *args, mutant=mutant, **options):
            p = real(shared, program, *args, **options)
            return mutant if p.program is one.program and p.feeds == one.feeds and p.steps else p

        monkeypatch.setattr(SharedPlans, "plan", instead)
        again, _, _ = steps(m, t, 2, n=2)
        assert same(again, want)
