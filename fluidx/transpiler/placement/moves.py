"""Records of the propagation: changes of placement that it inserts, and routes from the available placements of a value to another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...ir.forms import Held
from ...ir.operator import Operator
from ...ir.types import Placement, TensorType, show_placement
from .choose_row import nominal_bytes


class Move(NamedTuple):
    """A change of placement that the propagation inserts between two operators."""

    name: str
    old: Placement
    new: Placement
    type: TensorType
    reason: str

    @property
    def nbytes(self) -> int:
        """Bytes of the global value; an open axis counts as 1024."""
        return nominal_bytes(self.type)

    @property
    def sends(self) -> bool:
        """Does any rank send data? Sharding a replicated value needs no communication."""
        return not set(self.old) <= set(self.new)

    def __str__(self) -> str:
        moved = f"{self.nbytes} bytes" if self.sends else "nothing is sent"
        return f"%{self.name}: {show_placement(self.old)} to {show_placement(self.new)}, {moved}, for {self.reason}"


@dataclass(eq=False, slots=True)
class Route:
    """How a value reaches a placement: the number of the nearest available placement, and the ending of the new name. `here`: the value is
    available in the placement itself."""

    here: bool
    nearest: int
    ending: str
    place: Placement
    also: Held | None = None  # the value is also available in this placement; made for the first that asks
    alone: Held | None = None  # the value is available only in this placement; made for the first that asks


def every_move(move: Move, op: Operator) -> None:
    """Refuse no move."""


def suffix(old: Placement, new: Placement) -> str:
    """The ending of the name of a moved copy: sum, part, full or moved."""
    owed = [e for e in old if e.op]
    if owed and not any(e.op for e in new):
        return owed[0].op
    if not old:
        return "part"
    return "moved" if new else "full"
