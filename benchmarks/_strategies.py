"""The strategies of the tables about many ranks, and on what ranks each is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fluidx as fx

S = fx.strategies


def _hosts(ranks: int) -> fx.Cluster:
    """Hosts of 4 devices; 4 ranks are on two hosts."""
    return fx.Cluster(ranks // 4, 4) if ranks > 4 else fx.Cluster(2, ranks // 2)


def _same(ranks: int) -> int:
    return ranks


STRATEGIES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "data_parallel": (S.data_parallel, _same),
    "reduce_broadcast": (S.reduce_broadcast, _same),
    "ring_optimizer": (S.ring_optimizer, _same),
    "zero1": (S.zero1, _same),
    "zero2": (S.zero2, _same),
    "zero3": (S.zero3, _same),
    "fsdp": (S.fsdp, _same),
    "micro_batches": (lambda: S.micro_batches(2), _same),
    "replicas": (S.replicas, _same),
    "rails": (S.rails, _hosts),
    "hierarchical": (S.data_parallel, _hosts),
    "reduction_servers": (lambda: S.reduction_servers(2), _same),
    "parameter_server": (lambda: S.parameter_server(2), _same),
    "ring": (lambda: S.data_parallel(algorithm="ring"), _same),
    "tree": (lambda: S.data_parallel(algorithm="tree"), _same),
    "double_binary_tree": (lambda: S.data_parallel(algorithm="double_binary_tree"), _same),
    "halving_doubling": (lambda: S.data_parallel(algorithm="halving_doubling"), _same),
    "zero1 ring": (lambda: S.zero1(algorithm="ring"), _same),
    "fsdp ring": (lambda: S.fsdp(algorithm="ring"), _same),
}
AT_FOUR = {"data_parallel": 10, "ring_optimizer": 15, "zero1": 15, "fsdp": 20}  # us per operator of transpile on 4 ranks, goals


def against(goal: float, found: float) -> str:
    """A goal, and whether it was reached."""
    return f"goal {goal:g}{'' if found <= goal else ', missed'}"
