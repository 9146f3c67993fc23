"""The state variables that have a value when a step begins: written by startup on each rank, or to be loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank_values import VariableValues


class Started:
    """The values of the ranks after startup. By default every state variable has a value.

    `loaded`: state variables that no startup program writes, also on one device; they are loaded from a checkpoint.
    """

    def __init__(self, rank_values: VariableValues | None = None, loaded: Collection[str] = ()):
        self.rank_values, self.loaded = rank_values, loaded

    def everywhere(self, name: str) -> bool:
        """True if it is known without a look at each rank that every rank has a value."""
        values = self.rank_values
        return values is None or name in self.loaded or (name in values.written_by_all and name not in values.declared.differs)

    def on(self, name: str, rank: int) -> bool:
        """True if a rank has a value, which may have no elements."""
        values = self.rank_values
        return self.everywhere(name) or (values is not None and name in values.declared.vars and values.value(name, rank) is not None)
