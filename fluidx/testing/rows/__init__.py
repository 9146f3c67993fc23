"""The judge of access patterns: every row of an op is executed on its samples, and what no row allows is tried too.

A row is a lemma: if the operands lie so, running the kernel on every rank's part, told what `Part` says, gives the parts of outputs that
lie so, for any number of ranks and any cut.
"""

from .execute import Verdict, WrongRow, check_rows, judge, thin_factors
from .search import MissingRow, missing_rows

__all__ = ["MissingRow", "Verdict", "WrongRow", "check_rows", "judge", "missing_rows", "thin_factors"]
