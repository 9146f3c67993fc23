"""What is known of a value before it exists: its dtype, its shape, and where its parts lie among the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .dtypes import FLOATS, SHORT, np_dtype

ANY = -1  # an axis whose size is known when the program is fed, usually the batch


@dataclass(frozen=True, slots=True)
class TensorType:
    """The dtype and shape of a value; -1 is an axis whose size the feed decides.

    >>> TensorType("float32", (-1, 10))
    f32[-1,10]
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements, or -1 when an axis is open."""
        return ANY if ANY in self.shape else prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value, an open axis counted as 1."""
        return abs(prod(self.shape)) * np_dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def with_shape(self, shape: Iterable[int]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.shape)

    def accepts(self, other: TensorType) -> bool:
        """True when a value of type `other` can stand where this type is declared (open axes match any size)."""
        mine, theirs = self.shape, other.shape
        if self.dtype != other.dtype or len(mine) != len(theirs):
            return False
        return mine == theirs or all(a == b or a == ANY or b == ANY for a, b in zip(mine, theirs, strict=True))

    def __repr__(self) -> str:
        return f"{SHORT[self.dtype]}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of `group` holds one slice along `axis`, in rank order.

    The axis is cut between blocks of `unit` neighbours: of B blocks, rank k of n holds k*B//n to (k+1)*B//n. The unit is 1 unless
    axes were folded (a reshape, attention heads, channel groups).
    """

    axis: int
    group: str = "dp"
    unit: int = 1

    def __str__(self) -> str:
        return f"shard({self.axis}{f', {self.unit}' if self.unit != 1 else ''}) over {self.group}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of `group` holds one term; the value is their `op` (sum, max or min)."""

    op: str
    group: str = "dp"

    def __str__(self) -> str:
        return f"partial({self.op}) over {self.group}"


@dataclass(frozen=True, slots=True)
class At:
    """Only the rank with index `root` in `group` holds the value; elsewhere it is undefined."""

    root: int
    group: str = "dp"

    def __str__(self) -> str:
        return f"at({self.root}) over {self.group}"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rank k of `group` holds elements bounds[k] to bounds[k + 1] of the value laid out flat, as one axis."""

    bounds: tuple[int, ...]
    group: str = "dp"

    def __str__(self) -> str:
        return f"pieces({', '.join(map(str, self.bounds))}) over {self.group}"


@dataclass(frozen=True, slots=True)
class Own:
    """Each rank of `group` has a value of its own: the name stands for as many values as the group has ranks, its replicas.

    What one device computes of a value, every rank computes of its own. Data that lies so is dealt to the ranks by rows.
    """

    group: str = "dp"

    def __str__(self) -> str:
        return f"own over {self.group}"


@dataclass(frozen=True, slots=True)
class Local:
    """Each rank holds a value of its own, of the type that is written: a step of an algorithm that means nothing by itself."""

    group: str = ""

    def __str__(self) -> str:
        return "local"


Entry = Shard | Partial | At | Pieces | Own | Local
# A variable's placement: one entry for each group over which it is not replicated; () is replicate. Of two entries that cut one axis
# the first cuts the whole, the second what the first leaves.
Placement = tuple[Entry, ...]
REPLICATE: Placement = ()


def show_placement(placement: Placement) -> str:
    """`replicate`, or the entries as program text writes them."""
    return " ".join(str(p) for p in placement) if placement else "replicate"
