"""`IfElse` computes the rows of a batch in one of two ways, by a condition, and joins them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._checks import wrong
from ..ir import Variable
from .helper import LayerWriter


class IfElse:
    """Compute the rows where `cond`, bool [n, 1], is true in one block and the other rows in another. `ie()` returns all rows in order.

    In a block, `input(x)` is the block's rows of x. Their number depends on values, so a program with IfElse runs on one device. If both
    blocks treat each row separately, `layers.where(cond, x, y)` runs on ranks too.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x = fx.data("x", [None, 1], "float32")
    ...     ie = fx.layers.IfElse(x > 0.0)
    ...     with ie.true_block():
    ...         ie.output(ie.input(x) * 10.0)
    ...     with ie.false_block():
    ...         ie.output(ie.input(x) - 1.0)
    ...     (y,) = ie()
    >>> fx.Executor().run(main, feed={"x": np.float32([[1], [-1], [2]])}, fetch_list=[y])[0].tolist()
    [[10.0], [-2.0], [20.0]]
    """

    def __init__(self, cond: Variable, name: str | None = None):
        self.helper = LayerWriter("ifelse", name, label="layers.IfElse")
        cond = self.helper.variable(cond, "cond")
        if cond.dtype != "bool" or cond.ndim not in (1, 2) or cond.ndim == 2 and cond.shape[1] != 1:
            raise wrong(f"{self.helper.label}: cond must be bool [n, 1]; variable {cond.name!r} is {cond.desc.type}")
        self._cond = cond if cond.ndim == 1 else self.helper.op("reshape", cond, shape=(-1,))
        self._rows: dict[bool, Variable] = {}
        self._outputs: dict[bool, list[Variable]] = {}
        self._inside: bool | None = None

    @contextmanager
    def _block(self, which: bool) -> Iterator[None]:
        if self._inside is not None or which in self._outputs:
            raise wrong(f"{self.helper.label}: each block is written once, and not inside of the other")
        self._inside, self._outputs[which] = which, []
        chosen = self._cond if which else self.helper.op("logical_not", self._cond)
        self._rows[which] = self.helper.op("where_index", chosen)
        try:
            yield
        finally:
            self._inside = None

    def true_block(self) -> Any:
        """Operators written inside work on the rows where the condition holds."""
        return self._block(True)

    def false_block(self) -> Any:
        """Operators written inside work on the other rows."""
        return self._block(False)

    def input(self, x: Variable) -> Variable:
        """The rows of x that belong to the block."""
        if self._inside is None:
            raise wrong(f"{self.helper.label}: input() must be called in true_block() or false_block()")
        return self.helper.op("gather", self.helper.variable(x, "x"), self._rows[self._inside])

    def output(self, *outs: Variable) -> None:
        """Results of the block, with one row for each row of its inputs. Both blocks have equally many results."""
        if self._inside is None:
            raise wrong(f"{self.helper.label}: output() must be called in true_block() or false_block()")
        self._outputs[self._inside] += [self.helper.variable(o, "a result") for o in outs]

    def __call__(self) -> list[Variable]:
        """The results of both blocks, with all rows in order."""
        yes, no = self._outputs.get(True, []), self._outputs.get(False, [])
        if len(yes) != len(no) or not yes:
            raise wrong(f"{self.helper.label}: both blocks must have equally many outputs, at least one; found {len(yes)} and {len(no)}")
        merged = []
        for a, b in zip(yes, no):
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise wrong(f"{self.helper.label}: the blocks give {a.desc.type} and {b.desc.type}; rows must have one type")
            whole = self.helper.op(
                "fill_constant_batch_size_like", self._cond, shape=(-1, *a.shape[1:]), dtype=a.dtype, value=0.0, input_dim_idx=0,
                output_dim_idx=0,
            )  # fmt: skip
            for part, which in ((a, True), (b, False)):
                whole = self.helper.op("scatter_nd_add", whole, self._rows[which], part)
            merged.append(whole)
        return merged


__all__ = ["IfElse"]
