"""The texts of a disagreement between ranks. meet.c has the same; tests/comm/test_disagreement.py compares them."""

from __future__ import annotations

from typing import Any

from .base import CommError


def other_call(rank: int, call: Any, other: int, others: Any) -> str:
    """Two members of a group make different calls.

    >>> other_call(0, "barrier", 1, "all_reduce (sum) of float32[4]")
    'rank 0 is in barrier, rank 1 in all_reduce (sum) of float32[4]'
    """
    return f"rank {rank} is in {call}, rank {other} in {others}"


def other_count(rank: int, given: int, what: str, expected: int, ranks: int) -> str:
    """A member's number of parts is not that of the group's ranks.

    >>> other_count(1, 2, "all_to_all", 3, 3)
    'rank 1 passes 2 parts to all_to_all and expects 3, in a group of 3 ranks'
    """
    return f"rank {rank} passes {given} parts to {what} and expects {expected}, in a group of {ranks} ranks"


def other_type(rank: int, want: str, source: int, what: str, have: str) -> str:
    """A part of a collective has another type than its receiver expects.

    >>> other_type(0, "float32[3]", 1, "all_gather", "float32[4]")
    'rank 0 expects float32[3] from rank 1 in all_gather, which gives float32[4]'
    """
    return f"rank {rank} expects {want} from rank {source} in {what}, which gives {have}"


def other_message(rank: int, want: str, source: int, have: str) -> str:
    """A message has another type than its receiver expects.

    >>> other_message(1, "float32[3]", 0, "float32[4]")
    'rank 1 expects float32[3] from rank 0, which sent float32[4]'
    """
    return f"rank {rank} expects {want} from rank {source}, which sent {have}"


def disagreement(why: str, rank: int) -> CommError:
    """The error of a disagreement that `rank` caused."""
    return CommError(f"ranks disagree: {why}", rank=rank)
