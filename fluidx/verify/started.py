"""Which state has a value when a step begins: what startup wrote, rank by rank, and what is to be loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank_values import Holdings


class Started:
    """What the ranks hold at the end of startup. `loaded`: the state that no startup writes, on one device neither. By default there is a
    value under every name."""

    def __init__(self, held: Holdings | None = None, loaded: Collection[str] = ()):
        self.held, self.loaded = held, loaded

    def everywhere(self, name: str) -> bool:
        """Has every rank a value, seen without asking each?"""
        held = self.held
        return held is None or name in self.loaded or (name in held.by_all and name not in held.declared.differs)

    def on(self, name: str, rank: int) -> bool:
        """Has a rank a value? One without elements counts."""
        held = self.held
        return self.everywhere(name) or (held is not None and name in held.declared.vars and held.value(name, rank) is not None)
