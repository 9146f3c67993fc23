"""Rewrites of programs for one device or one rank: constants, identities, common subexpressions, dead code, and some that are asked for."""

from .base import EXACT, DropDead, DropIdentities, FoldConstants, MergeEqual, Request, Rewrite, rewritten, simplified
from .cross_entropy import JoinCrossEntropy
from .layout import ChannelsLast

__all__ = [
    "EXACT", "ChannelsLast", "DropDead", "DropIdentities", "FoldConstants", "JoinCrossEntropy", "MergeEqual", "Request", "Rewrite",
    "rewritten", "simplified",
]  # fmt: skip
