"""Rewrites of a program for one device or one rank: constant folding, identities, common subexpressions, dead code, and optional
rewrites."""

from ..ir.pass_base import Job, Pass
from .amp import Amp
from .attention import JoinAttention
from .base import EXACT, DropDead, DropIdentities, FoldConstants, MergeEqual, rewritten, simplified
from .cross_entropy import JoinCrossEntropy
from .layer_norm import JoinLayerNorm
from .layout import ChannelsLast
from .offload_activations import OffloadActivations
from .raise_updates import RaiseUpdates
from .recompute import Recompute

Rewrite = Pass  # its name from when rewrites for one device had a class of their own

__all__ = [
    "EXACT", "Amp", "ChannelsLast", "DropDead", "DropIdentities", "FoldConstants", "Job", "JoinAttention", "JoinCrossEntropy",
    "JoinLayerNorm", "MergeEqual", "OffloadActivations", "Pass", "RaiseUpdates", "Recompute", "Rewrite", "rewritten", "simplified",
]  # fmt: skip
