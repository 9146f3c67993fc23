"""Prove programs right before they run: alone (types, definitions) and all ranks together (matching, deadlock, same answers)."""

from .evaluate import loss_seeds
from .local import check_program
from .ranks import Report, verify_ranks

__all__ = ["Report", "check_program", "loss_seeds", "verify_ranks"]
