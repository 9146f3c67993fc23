"""Tools for tests: checks on ops and passes, central differences, an interpreter to compare the executor with, mutants for the verifier."""

from .check_op import check_op
from .check_pass import check_pass
from .mutate import mutations
from .numeric_grad import numeric_grad
from .ranks import each_rank, run_ranks
from .reference import interpret

__all__ = ["check_op", "check_pass", "each_rank", "interpret", "mutations", "numeric_grad", "run_ranks"]
