"""Changes of placement that a walk puts between operators, and how a value gets from where it lies to where it is wanted."""

from __future__ import annotations

from typing import NamedTuple

from ...ir.forms import Held
from ...ir.operator import Operator
from ...ir.types import Placement, TensorType, show_placement
from .choose_row import nominal_bytes


class Move(NamedTuple):
    """A change of placement that the walk put between two operators."""

    name: str
    old: Placement
    new: Placement
    type: TensorType
    reason: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, an open axis counted as 1024."""
        return nominal_bytes(self.type)

    @property
    def sends(self) -> bool:
        """Does anything leave a rank? What every rank of a group has, each of them cuts for itself."""
        return not set(self.old) <= set(self.new)

    def __str__(self) -> str:
        moved = f"{self.nbytes} bytes" if self.sends else "nothing is sent"
        return f"%{self.name}: {show_placement(self.old)} to {show_placement(self.new)}, {moved}, for {self.reason}"


class Route(NamedTuple):
    """How what lies in some way gets to a placement: from which of those at hand, and what its new name ends in. `here`: it lies there."""

    here: bool
    nearest: int
    ending: str
    place: Placement
    alone: Held  # it lies there and nowhere else
    also: Held  # it lies there too


def every_move(move: Move, op: Operator) -> None:
    """Refuse no move."""


def suffix(old: Placement, new: Placement) -> str:
    """What the name of a moved copy ends in: sum, part, full or moved."""
    owed = [e for e in old if e.op]
    if owed and not any(e.op for e in new):
        return owed[0].op
    if not old:
        return "part"
    return "moved" if new else "full"
