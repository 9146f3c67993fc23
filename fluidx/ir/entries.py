"""Entries of placements: how the ranks of one group share a value. A kind of entry is one class, and other modules need not name it.

A caller asks an entry for what it has (an axis, a root, a reduction ...), which is None or empty for kinds that do not have it, and for
what follows from it (`holds`, `range_of`, `join` ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ProgramError
from .offsets import Offsets

if TYPE_CHECKING:
    from .types import TensorType

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def block_start(size: int, n: int, unit: int, k: int) -> int:
    """Where rank k of n begins on an axis that is cut between blocks of `unit` elements; the last block may be short.

    >>> [block_start(10, 4, 1, k) for k in range(5)], [block_start(12, 2, 4, k) for k in range(3)]
    ([0, 2, 5, 7, 10], [0, 4, 12])
    """
    return min(k * -(-size // unit) // n * unit, size)


class Entry(ABC):
    """How the ranks of `group` share a value. Ranks are named by their index in the group, from 0 to n - 1.

    The attributes below are those that some kinds have: a kind that has one declares it as a field.
    """

    __slots__ = ()

    group: str
    axis: int | None = None  # ranks hold slices along this axis
    unit: int = 1  # a slice begins at a multiple of so many elements
    op: str = ""  # ranks hold terms: this reduction of them (sum, max or min) is the value
    root: int | None = None  # only the rank with this index holds the value
    bounds: Offsets | None = None  # ranks hold ranges of the value laid out flat: rank k has elements bounds[k] to bounds[k + 1]
    is_cut = False  # does each rank hold some of the elements and no others?
    is_own = False  # does each rank have a value of its own, which is what one device would compute of it?
    is_local = False  # does each rank have a value of its own that means nothing by itself?

    @property
    @abstractmethod
    def spelling(self) -> str:
        """The entry as program text writes it, without the group."""

    @property
    def label(self) -> str:
        """A short form of the spelling, for pictures and tables."""
        return self.spelling

    def __str__(self) -> str:
        return f"{self.spelling} over {self.group}"

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The entry as a dictionary of the JSON form of programs."""

    def attrs(self) -> dict[str, Any]:
        """The entry as attributes of the operators that move values from or to it, without the group."""
        return {}

    def check(self, t: TensorType, n: int) -> str:
        """Why a value of type `t` cannot be shared so among n ranks; "" if it can."""
        return ""

    def holds(self, index: int) -> bool:
        """Does the rank hold anything of the value?"""
        return True

    def range_of(self, index: int, n: int, size: int) -> tuple[int, int]:
        """The range that a rank of n holds of `size` elements: along its axis, or of the flat value; all where nothing is cut."""
        return 0, size

    def join(self, parts: Sequence[Any]) -> Any:
        """The value, from what the ranks hold in the order of their index. Flat ranges make the flat value.

        Raises ProgramError where the ranks have values of their own, which make no single value.
        """
        raise ProgramError(f"{self}: each rank has a value of its own, which make no single value")

    @abstractmethod
    def over(self, group: str, scale: int = 1) -> Entry:
        """The same entry over another group; an axis is cut between blocks that are `scale` times as large."""

    @abstractmethod
    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        """Can an operand of type `t` that has the entry `have` be used by a placement rule that asks for this kind of entry?

        Units, roots and bounds are not compared. None is replicated.
        """

    def stand_in(self, k: int) -> Entry:
        """The k-th stand-in for an entry of this kind: for a root or flat ranges, whichever they are. An entry without them is its own."""
        return self

    @property
    def stands_for(self) -> int | None:
        """The number of a stand-in; None for an entry that is none."""
        return None


# `field()` hides the neutral value of Entry, which a dataclass would take for the default of the field.


@dataclass(frozen=True, slots=True)
class Shard(Entry):
    """Each rank of `group` holds one slice along `axis`, in rank order.

    The axis is cut between blocks of `unit` neighbours: of B blocks, rank k of n holds k*B//n to (k+1)*B//n. The unit is 1 unless
    axes were folded (a reshape, attention heads, channel groups).
    """

    axis: int = field()
    group: str = "dp"
    unit: int = 1
    is_cut = True

    @property
    def spelling(self) -> str:
        return f"shard({self.axis}{f', {self.unit}' if self.unit != 1 else ''})"

    def to_json(self) -> dict[str, Any]:
        return {"shard": self.axis, "group": self.group} | ({"unit": self.unit} if self.unit != 1 else {})

    def attrs(self) -> dict[str, Any]:
        return {"axis": self.axis, "unit": self.unit}

    def check(self, t: TensorType, n: int) -> str:
        if not 0 <= self.axis < t.ndim:
            return f"{self} names an axis that {t} does not have"
        return f"{self} has no unit" if self.unit < 1 else ""

    def range_of(self, index: int, n: int, size: int) -> tuple[int, int]:
        return block_start(size, n, self.unit, index), block_start(size, n, self.unit, index + 1)

    def join(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, self.axis)

    def over(self, group: str, scale: int = 1) -> Shard:
        return Shard(self.axis, group, self.unit * scale)

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        return have is not None and have.axis == self.axis


@dataclass(frozen=True, slots=True)
class Partial(Entry):
    """Each rank of `group` holds one term; the value is their `op` (sum, max or min)."""

    op: str = field()
    group: str = "dp"

    @property
    def spelling(self) -> str:
        return f"partial({self.op})"

    def to_json(self) -> dict[str, Any]:
        return {"partial": self.op, "group": self.group}

    def attrs(self) -> dict[str, Any]:
        return {"op": self.op}

    def check(self, t: TensorType, n: int) -> str:
        return "" if self.op in REDUCE else f"{self} is no reduction that a value can wait for"

    def join(self, parts: Sequence[Any]) -> Any:
        return reduce(REDUCE[self.op], parts)

    def over(self, group: str, scale: int = 1) -> Partial:
        return Partial(self.op, group)

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        """A replicated value is its own maximum; as a term of a sum it would count once for each rank."""
        return self.op != "sum" if have is None else have.op == self.op


@dataclass(frozen=True, slots=True)
class At(Entry):
    """Only the rank with index `root` in `group` holds the value; elsewhere it is undefined."""

    root: int = field()
    group: str = "dp"

    @property
    def spelling(self) -> str:
        return f"at({self.root})"

    def to_json(self) -> dict[str, Any]:
        return {"at": self.root, "group": self.group}

    def attrs(self) -> dict[str, Any]:
        return {"root": self.root}

    def check(self, t: TensorType, n: int) -> str:
        return "" if 0 <= self.root < n else f"{self} names a rank outside of the group's {n}"

    def holds(self, index: int) -> bool:
        return index == self.root

    def join(self, parts: Sequence[Any]) -> Any:
        return parts[self.root]

    def over(self, group: str, scale: int = 1) -> At:
        return At(self.root, group)

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        return have is None or have.root is not None

    def stand_in(self, k: int) -> At:
        return At(-2 - k, self.group)

    @property
    def stands_for(self) -> int | None:
        return -2 - self.root if self.root < -1 else None


@dataclass(frozen=True, slots=True)
class Pieces(Entry):
    """Rank k of `group` holds elements bounds[k] to bounds[k + 1] of the value laid out flat, as one axis."""

    bounds: Offsets = field()
    group: str = "dp"
    is_cut = True

    def __post_init__(self) -> None:
        if self.bounds.__class__ is not Offsets:
            object.__setattr__(self, "bounds", Offsets(self.bounds))

    @property
    def spelling(self) -> str:
        return f"pieces({', '.join(map(str, self.bounds))})"

    @property
    def label(self) -> str:
        return "pieces"

    def to_json(self) -> dict[str, Any]:
        return {"pieces": list(self.bounds), "group": self.group}

    def attrs(self) -> dict[str, Any]:
        return {"bounds": self.bounds}

    def check(self, t: TensorType, n: int) -> str:
        bounds = self.bounds
        if len(bounds) != n + 1 or not bounds.rising or bounds[-1] != t.numel:  # an open type has -1 elements
            return f"{self} does not cut the elements of {t} among {n} ranks"
        return ""

    def range_of(self, index: int, n: int, size: int) -> tuple[int, int]:
        if len(self.bounds) != n + 1:
            raise ProgramError(f"{self} has {len(self.bounds) - 1} ranges for the {n} ranks of {self.group}")
        return self.bounds[index], self.bounds[index + 1]

    def join(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts)

    def over(self, group: str, scale: int = 1) -> Pieces:
        return Pieces(self.bounds, group)

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        return have is not None and have.bounds is not None

    def stand_in(self, k: int) -> Pieces:
        return Pieces(Offsets((k + 1,)), self.group)

    @property
    def stands_for(self) -> int | None:
        return self.bounds[0] - 1 if len(self.bounds) == 1 else None


@dataclass(frozen=True, slots=True)
class Own(Entry):
    """Each rank of `group` has a value of its own: the name stands for as many values as the group has ranks, its replicas.

    Every rank computes of its own value what one device computes of one. A feed of such a variable is split among the ranks by rows.
    """

    group: str = "dp"
    is_own = True

    @property
    def spelling(self) -> str:
        return "own"

    def to_json(self) -> dict[str, Any]:
        return {"own": True, "group": self.group}

    def over(self, group: str, scale: int = 1) -> Own:
        return Own(group)

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        """A replicated value stands for one that each rank has, unless it is open: then all ranks' rows are more than those of one."""
        return have.is_own if have is not None else t is None or t.numel >= 0


@dataclass(frozen=True, slots=True)
class Local(Entry):
    """Each rank holds a value of its own, of the type that is written: a step of an algorithm that means nothing by itself."""

    group: str = ""
    is_local = True

    def __str__(self) -> str:
        return self.spelling

    @property
    def spelling(self) -> str:
        return "local"

    def to_json(self) -> dict[str, Any]:
        return {"local": True}

    def over(self, group: str, scale: int = 1) -> Local:
        return self

    def admits(self, have: Entry | None, t: TensorType | None) -> bool:
        return have is not None and have.is_local


# A variable's placement: one entry for each group over which it is not replicated; () is replicate. Of two entries that cut one axis
# the first cuts the whole, the second what the first leaves.
Placement = tuple[Entry, ...]
REPLICATE: Placement = ()


def axis_of(e: Entry | None) -> int | None:
    """The axis along which an entry cuts a value; None for replicated too."""
    return None if e is None else e.axis


def is_local(placement: Placement) -> bool:
    """Does each rank have a value of its own that means nothing by itself?"""
    return bool(placement) and placement[0].is_local


def show_placement(placement: Placement) -> str:
    """`replicate`, or the entries as program text writes them."""
    return " ".join(str(p) for p in placement) if placement else "replicate"
