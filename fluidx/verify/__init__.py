"""Prove programs right before they run: one alone, and those of all ranks together against the program for one device."""

from .report import Report
from .verify_ranks import check_program, verify_common, verify_ranks

__all__ = ["Report", "check_program", "verify_common", "verify_ranks"]
