"""The verifier: checks one program by itself, and proves that the rank programs together compute what the program for one device does."""

from .report import Report
from .verify_ranks import check_program, verify_common, verify_ranks

__all__ = ["Report", "check_program", "verify_common", "verify_ranks"]
