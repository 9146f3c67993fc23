"""Schedules of a pipeline: the order of the work of each stage, and the time slot of each piece of work.

A slot is the time that one stage needs for one forward or one backward of one micro-batch; both count as one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Action(NamedTuple):
    """The forward or backward work of a stage on one micro-batch."""

    backward: bool
    turn: int

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.turn}"


def gpipe(stages: int, turns: int, stage: int) -> list[Action]:
    """All forwards, then all backwards. Source: Huang et al., "GPipe" (2019)."""
    return [Action(backward, k) for backward in (False, True) for k in range(turns)]


def one_f_one_b(stages: int, turns: int, stage: int) -> list[Action]:
    """First one forward for each later stage, then one forward and one backward alternately, then the remaining backwards.

    Stage s of p keeps the activations of at most p - s micro-batches. Source: Narayanan et al., "PipeDream" (2019) and "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).

    >>> " ".join(map(str, one_f_one_b(3, 4, stage=0)))
    'F0 F1 F2 B0 F3 B1 B2 B3'
    """
    ahead = min(stages - 1 - stage, turns)
    steady = [Action(backward, k + (0 if backward else ahead)) for k in range(turns - ahead) for backward in (False, True)]
    return [*(Action(False, k) for k in range(ahead)), *steady, *(Action(True, k) for k in range(turns - ahead, turns))]


SCHEDULES: Mapping[str, Callable[[int, int, int], list[Action]]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def slots(schedule: str, stages: int, turns: int) -> list[dict[Action, int]]:
    """The slot of every action, for each stage: a forward starts after the forward of the previous stage, a backward after that of the
    next.

    >>> [list(of.values()) for of in slots("gpipe", stages=2, turns=2)]
    [[0, 1, 4, 5], [1, 2, 3, 4]]
    """
    orders = [SCHEDULES[schedule](stages, turns, s) for s in range(stages)]
    found: list[dict[Action, int]] = [{} for _ in orders]
    slot = 0
    while any(len(done) < len(order) for done, order in zip(found, orders, strict=True)):
        begun = [order[len(done)] if len(done) < len(order) else None for done, order in zip(found, orders, strict=True)]
        for s, action in enumerate(begun):
            if action is not None and _after(found, s, action) < slot:
                found[s][action] = slot
        slot += 1
    return found


def _after(found: list[dict[Action, int]], stage: int, action: Action) -> float:
    """The slot of the action that `action` waits for: -1 if there is none, infinity if it has no slot yet."""
    before = stage + 1 if action.backward else stage - 1
    if before < 0:
        return -1
    if before == len(found):
        return found[stage].get(Action(False, action.turn), float("inf"))
    return found[before].get(action, float("inf"))


def bubble(schedule: str, stages: int, turns: int) -> float:
    """The share of all slots in which a stage has nothing to do.

    >>> bubble("gpipe", stages=4, turns=8) == 3 / 11
    True
    """
    found = slots(schedule, stages, turns)
    last = 1 + max(max(of.values()) for of in found)
    return 1 - 2 * turns / last
