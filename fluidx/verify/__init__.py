"""Prove programs right before they run: one alone, and those of all ranks together against the program for one device."""

from .ranks import check_program, verify_ranks
from .report import Report

__all__ = ["Report", "check_program", "verify_ranks"]
