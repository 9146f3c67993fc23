"""What the declaration of an op says: its slots and attributes, effect, access pattern, gradient and kernel, with their meaning."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .op_facets import Arithmetic, Autocast, Comm, Control, Native, Rewrite, Storage


class Effect(enum.Enum):
    """What an operator does beside computing its outputs."""

    PURE = "pure"  # a function of its inputs: may be dropped, shared or moved
    RANDOM = "random"  # also of its seed and the step count
    HOST = "host"  # prints or otherwise touches the host: keeps its place
    COLLECTIVE = "collective"  # every rank of a group takes part
    P2P = "p2p"  # this rank and one peer take part


class Required:
    """Default of an attribute that has none: `attrs = {"shape": Required(tuple)}`. A tuple holds ints, a tuple[str, ...] strings;
    an Array may also be a tuple of numbers (constants.py: elements)."""

    def __init__(self, type: Any):
        self.type = type

    def __repr__(self) -> str:
        return f"required {self.type.__name__}"


class Slot(NamedTuple):
    """One input or output of an op. Written "X", "X?" (may be absent) or "X*" (a list)."""

    name: str
    optional: bool = False
    many: bool = False

    @staticmethod
    def of(text: str) -> Slot:
        return Slot(text.rstrip("?*"), text.endswith("?"), text.endswith("*"))


@dataclass(frozen=True)
class Sample:
    """Arguments that an op is tested with: arrays in slot order (None for an absent one, a list for a list), and attributes.

    `grad` names the input slots whose gradient is checked by central differences (None: every float input);
    `tolerance` relaxes that check where the function is stiff; `why` says so.
    """

    args: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    grad: tuple[str, ...] | None = None
    tolerance: float = 5e-3
    why: str = ""

    @staticmethod
    def of(*args: Any, grad: tuple[str, ...] | None = None, tolerance: float = 5e-3, why: str = "", **attrs: Any) -> Sample:
        return Sample(args, attrs, grad, tolerance, why)


class OpFields:
    """What the declaration of an op says. Everything but `name` and `infer` has a default.

    infer(*types, **attrs) -> TensorType | tuple      the only type rule; may raise ProgramError
    pattern                                           the access pattern, from which placements follow; see ir/pattern.py
    grad(b, op, g) -> variable(s) in input-slot order   `None` for an input without gradient; no `grad`: not differentiable
    kernel(xp, *arrays, **attrs) -> array(s)          `xp` is numpy or cupy. A kernel that has a parameter `out` writes
                                                      there (one array, or a tuple of them) and returns nothing. One with a parameter
                                                      `ctx` gets the rank's run context (step, rank, comm), one with a
                                                      parameter `part` gets the range of the global value that this rank computes
                                                      (ir/parts.py: Part; None: the whole value)
    samples() -> Sample, ...                          what the op is tested with
    expr                                              for an elementwise op, its scalar expression (ops/elementwise): a call
                                                      (attrs, shapes of the operands, axes of the result) -> expression with the numbers
                                                      of the attributes, {symbol: shape that broadcasts}; `expr.body` has symbols for them
    decompose(d) -> None                              writes the operator out in simpler ones that compute the same (ir/decomposition.py);
                                                      one that writes nothing keeps the operator
    native, storage, rewrite, autocast, arithmetic, comm, control    what few authors meet, with defaults: ir/op_facets.py
    """

    name: ClassVar[str] = ""
    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ("Out",)
    attrs: ClassVar[Mapping[str, Any]] = {}
    effect: ClassVar[Effect] = Effect.PURE
    # a line (see pattern.py), or a function (ins, outs, attrs) -> line or (line, sizes) over flat lists of types; None: every operand must
    # be whole
    pattern: ClassVar[Any] = None
    grad: ClassVar[Callable[..., Any] | None] = None
    kernel: ClassVar[Callable[..., Any] | None] = None
    expr: ClassVar[Any] = None
    decompose: ClassVar[Callable[..., Any] | None] = None

    native: ClassVar[Native] = Native()
    storage: ClassVar[Storage] = Storage()
    rewrite: ClassVar[Rewrite] = Rewrite()
    autocast: ClassVar[Autocast] = Autocast()
    arithmetic: ClassVar[Arithmetic] = Arithmetic()
    comm: ClassVar[Comm] = Comm()
    control: ClassVar[Control] = Control()
