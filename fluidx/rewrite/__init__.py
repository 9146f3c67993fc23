"""Rewrites of programs for one device or one rank: constants, identities, common subexpressions, dead code, and some that are asked for."""

from ..ir.pass_base import Job
from ..ir.pass_base import Pass as Rewrite
from .amp import Amp
from .attention import JoinAttention
from .base import EXACT, DropDead, DropIdentities, FoldConstants, MergeEqual, rewritten, simplified
from .cross_entropy import JoinCrossEntropy
from .layer_norm import JoinLayerNorm
from .layout import ChannelsLast

__all__ = [
    "EXACT", "Amp", "ChannelsLast", "DropDead", "DropIdentities", "FoldConstants", "Job", "JoinAttention", "JoinCrossEntropy",
    "JoinLayerNorm", "MergeEqual", "Rewrite", "rewritten", "simplified",
]  # fmt: skip
