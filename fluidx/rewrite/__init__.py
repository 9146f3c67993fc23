"""Rewrites of programs for one device or one rank: constants, identities, common subexpressions, dead code."""

from .base import EXACT, DropDead, DropIdentities, FoldConstants, MergeEqual, Request, Rewrite, rewritten, simplified

__all__ = ["EXACT", "DropDead", "DropIdentities", "FoldConstants", "MergeEqual", "Request", "Rewrite", "rewritten", "simplified"]
