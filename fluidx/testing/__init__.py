"""Tools for tests: the checks on every op, central differences, and an interpreter to compare the executor with."""

from .check_op import check_op
from .numeric_grad import numeric_grad
from .reference import interpret

__all__ = ["check_op", "interpret", "numeric_grad"]
