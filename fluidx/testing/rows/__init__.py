"""Tests of placement rules by execution: every row of an op is run on its samples, and placements that no row allows are tried too.

A row is a lemma: if the operands have its input placements, then running the kernel on each rank's local values, with its `Part`, gives
local values of outputs with its output placements. This holds for any number of ranks and any bounds.
"""

from .execute import RowReport, WrongRow, check_rows, execute_rows
from .search import MissingRow, missing_rows

__all__ = ["MissingRow", "RowReport", "WrongRow", "check_rows", "execute_rows", "missing_rows"]
