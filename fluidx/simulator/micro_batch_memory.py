"""What more micro-batches than a program has add to the memory of a rank: rows of its feeds, and activations that wait for backward."""

from __future__ import annotations

from ..executor.plan.records import Plan
from ..ir.opdef import Effect, opdef
from .micro_batches import MicroBatches, WorkOfSteps


def more_bytes(plan: Plan, of: MicroBatches) -> int:
    """The bytes of a run of `of.simulated` micro-batches that one of `of.given`, which the plan is of, does not need.

    The feeds have the rows of all micro-batches. Stage s of n has at most n - s micro-batches whose backward work it did not begin, and
    the activation of one more that it has received ("1f1b"), or all of them ("gpipe"); without stages it has one.
    """
    fed = plan.nbytes("feed") * (of.simulated - of.given) // of.given
    if not of.schedule:
        return fed
    made, received, depth = _saved(plan, of)
    ahead = (of.simulated, of.given) if of.schedule == "gpipe" else (min(of.simulated, depth), min(of.given, depth))
    more = ahead[0] - ahead[1]
    arrived = more if of.schedule == "gpipe" else min(of.simulated, depth + 1) - min(of.given, depth + 1)
    return fed + made * more + received * arrived


def _saved(plan: Plan, of: MicroBatches) -> tuple[int, int, int]:
    """The bytes of the first micro-batch that forward work makes or receives and backward work reads, and the stages from this one on."""
    works = WorkOfSteps(plan, of)
    received, read = set[str](), set[str]()
    for k, step in enumerate(plan.steps):
        works(step, k)
        for op in step.ops:
            if opdef(op.type).effect is Effect.P2P:
                received.update(op.output_arg_names)
            elif (work := works.work(op)) is not None and work.backward:
                read.update(op.input_arg_names)
    sizes: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for name in read:
        value = plan.values.get(name)
        if value is None or works.backward.get(name, True) or works.turn_of(name) != 0:
            continue
        buffer = plan.buffers[value.buffer]
        if buffer.kind == "arena" and not buffer.on_host:
            sizes[name in received][value.buffer] = buffer.nbytes
    return sum(sizes[0].values()), sum(sizes[1].values()), len(works.ranks) - works.stage
