"""What is known of a value before it exists: its dtype, its shape, and where its parts lie among the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .dtypes import SHORT, np_dtype

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
        return prod(abs(d) for d in self.shape) * np_dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float16", "bfloat16", "float32", "float64")

    def with_shape(self, shape: Iterable[int]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.shape)

    def accepts(self, other: TensorType) -> bool:
        """True when a value of type `other` can stand where this type is declared (open axes match any size)."""
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(a == b or a == ANY or b == ANY for a, b in zip(self.shape, other.shape, strict=True))
        )

    def __repr__(self) -> str:
        return f"{SHORT[self.dtype]}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of `group` holds one slice along `axis`, in rank order."""

    axis: int
    group: str = "dp"

    def __str__(self) -> str:
        return f"shard({self.axis}) over {self.group}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of `group` holds one term; the value is their `op` (sum, avg, max or min)."""

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


# A variable's placement: one entry for each group over which it is not replicated; () is replicate.
Placement = tuple[Shard | Partial | At, ...]
REPLICATE: Placement = ()


def show_placement(placement: Placement) -> str:
    """`replicate`, or the entries as program text writes them."""
    return " ".join(str(p) for p in placement) if placement else "replicate"
