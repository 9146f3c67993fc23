"""Communication on a stream of its own: the plan waits exactly where data demands it.

`LateCommunicator` does nothing when it is called and everything when it is waited for, which is as late as a stream can be: a missing
wait, or memory that is reused too early, gives wrong numbers.
"""

import numpy as np
import pytest

import fluidx as fx
from fluidx.comm.threads.communicator import ThreadCommunicator
from fluidx.comm.threads.world import ThreadWorld
from fluidx.executor.plan.overlap_rules import Access, overlap
from fluidx.testing.models import classifier, train_single


class LateCommunicator(ThreadCommunicator):
    asynchronous = True

    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.started, self.done = [], 0

    def mark(self):
        return len(self.started)

    def order_after(self, mark):
        while self.done < mark:
            self.started[self.done]()
            self.done += 1


def _later(name):
    def start(self, *args):
        self.started.append(lambda: getattr(super(LateCommunicator, self), name)(*args))

    return start


for _name in ("broadcast", "all_reduce", "reduce", "exchange"):
    setattr(LateCommunicator, _name, _later(_name))


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer"])
@pytest.mark.parametrize("kind", ["mlp", "norm"])
def test_late_communication_gives_the_same_numbers(strategy, kind, monkeypatch):
    model = classifier(fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)), kind=kind)
    feeds = [model.feed(12, k) for k in range(3)]
    one, scope = train_single(model, feeds, [model.loss])
    monkeypatch.setattr(ThreadWorld, "communicator", lambda self, rank: LateCommunicator(self, rank))
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=model.main, startup_program=model.startup, trainers=3)
    with fx.ParallelExecutor(t, places=fx.cpu_places(3), timeout=10) as exe:
        exe.run_startup()
        many = [exe.run(feed=f, fetch_list=[model.loss]) for f in feeds]
        np.testing.assert_allclose(many, one, rtol=1e-5)
        for p, _ in model.gradients:
            np.testing.assert_allclose(exe.state(p), scope.get(p), rtol=1e-4, atol=1e-6)


def waits(steps):
    return overlap(steps).waits


def _access(reads="", writes="", communicates=False):
    return Access(frozenset(reads), frozenset(writes), communicates)


def test_compute_goes_on_until_the_received_value_is_read():
    send = _access("a", "b", True)
    assert waits([send, _access("x", "y"), _access("y", "z"), _access("b", "c")]) == {3: [0]}


def test_what_is_being_sent_may_be_read_but_not_overwritten():
    send = _access("a", "b", True)
    assert waits([send, _access("a", "y"), _access("y", "a")]) == {2: [0]}


def test_waiting_for_a_later_message_covers_the_earlier_ones():
    assert waits([_access("a", "b", True), _access("c", "d", True), _access("d", "e"), _access("b", "f")]) == {2: [0, 1]}


def test_what_nobody_reads_is_waited_for_at_the_end():
    assert waits([_access("a", "b", True), _access("x", "y")]) == {2: [0]}
