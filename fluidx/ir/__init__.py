"""The intermediate representation: programs, operators, variables, their types and placements, and the base of op declarations."""

from .builder import Builder
from .constants import Array
from .defaults import default_main_program, default_startup_program, device_guard, program_guard
from .dtypes import as_dtype, np_dtype
from .errors import (
    EOFException,
    ExecutionError,
    FeedError,
    FluidxError,
    NotInitializedError,
    ParseError,
    ProgramError,
    RankError,
    TranspileError,
    VerifyError,
    nearest,
)
from .op_facets import Arithmetic, Autocast, Comm, Control, Native, Rewrite, Storage
from .opdef import OPS, Effect, OpDef, Required, Sample, all_ops, opdef
from .operator import BlockRef, Operator, Role
from .parser import parse_pair
from .program import Block, Program, ProgramPair
from .source_location import Site, name_scope
from .text import excerpt
from .types import ANY, REPLICATE, At, Local, Own, Partial, Pieces, Placement, Shard, TensorType, show_placement
from .valuetypes import AnyRankType, MapType, OptionalType, SequenceType
from .var import Var
from .variable import Parameter, Variable

__all__ = [
    "ANY", "AnyRankType", "Array", "At", "Autocast", "Block", "BlockRef", "Builder", "Comm", "Control", "Arithmetic", "EOFException",
    "Effect", "ExecutionError", "FeedError", "FluidxError", "Local", "MapType", "Native", "NotInitializedError", "OPS", "OpDef", "Operator",
    "OptionalType", "Own", "Parameter", "ParseError", "Partial", "Pieces", "Placement", "Program", "ProgramError",
    "ProgramPair", "REPLICATE", "RankError", "Required", "Rewrite", "Role", "Sample", "SequenceType", "Shard", "Site", "Storage",
    "TensorType", "TranspileError", "Var", "Variable", "VerifyError", "all_ops",
    "as_dtype", "default_main_program", "default_startup_program", "device_guard", "excerpt", "name_scope", "nearest", "np_dtype",
    "opdef", "parse_pair", "program_guard", "show_placement",
]  # fmt: skip
