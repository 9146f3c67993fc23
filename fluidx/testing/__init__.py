"""Tools for tests: checks of ops, passes and rewrites, numeric gradients, runs on several ranks, and a reference interpreter."""

from .check_op import check_op
from .check_pass import check_pass
from .check_rewrite import check_rewrite
from .numeric_grad import numeric_grad
from .ranks import each_rank, run_ranks
from .reference import interpret
from .rows import check_rows, missing_rows

__all__ = ["check_op", "check_pass", "check_rewrite", "check_rows", "each_rank", "interpret", "missing_rows", "numeric_grad", "run_ranks"]
