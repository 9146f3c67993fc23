"""A rank program seen from its rank: types of local values, and for each operator its local attributes, its part and empty results.

Variables are declared with a global type and a placement. The local type follows from both and from the rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.entries import is_local
from ...ir.errors import ProgramError
from ...ir.opdef import Effect, OpDef
from ...ir.operator import Operator, attrs_key
from ...ir.parts import Coords, Part, feed_placement, holds, local_type, part_of
from ...ir.pattern import Pattern
from ...ir.program import Program
from ...ir.types import ANY, Placement, TensorType
from ...ir.var import Var
from ..context import RunContext

_PART_OPS = (Effect.PURE, Effect.RANDOM)  # only these get a LocalOp; communication operators compute their parts themselves


class LocalOp(NamedTuple):
    """An operator as this rank runs it, if that differs from the operator in the program."""

    attrs: Mapping[str, Any]  # with sizes made local
    part: Part | None = None
    ghosts: Mapping[int, TensorType] = {}  # operand number -> type, for operands of which only the shape is read: no value is needed
    skip: bool = False  # this rank has no element of the outputs
    fills: tuple[tuple[int, Any], ...] = ()  # (output number, constant) instead of a call: this rank has no terms to reduce

    def real_inputs(self, op: Operator, definition: type[OpDef]) -> list[str]:
        """The inputs whose values are read."""
        return [n for k, n in enumerate(definition.flat_slots(op.inputs, definition.in_slots)) if n is not None and k not in self.ghosts]

    def inputs(self, op: Operator, definition: type[OpDef], read: Callable[[str], Any], ghost: Callable[[TensorType], Any]) -> list[Any]:
        """The inputs arranged as arguments: `read(name)`, or `ghost(type)` for an input of which only the shape is read."""
        k, given = 0, {}
        for slot in definition.in_slots:
            names = op.inputs.get(slot.name, ())
            given[slot.name] = [ghost(self.ghosts[j]) if j in self.ghosts else read(n) for j, n in enumerate(names, k)]
            k += len(names) if slot.many else 1
        return definition.arrange(given, definition.in_slots)


class RankView:
    """The placements of a rank program, seen from its rank. `wholes` has the global types."""

    def __init__(self, program: Program, descs: Mapping[str, Var], places: Mapping[str, Placement], coords: Coords):
        self.program, self.descs, self.places, self.coords = program, descs, places, coords
        self.wholes: dict[str, TensorType] = {}
        distinct = {id(p): p for p in places.values()}.items()  # many variables have one placement
        cut = {k for k, p in distinct if any(e.is_cut and self._ranks(e.group) > 1 for e in p)}
        own = {k for k, p in distinct if is_local(p)}
        absent = {k for k, p in distinct if not holds(p, coords)}
        self.cut = {n for n, p in places.items() if id(p) in cut}
        self.own = {n for n, p in places.items() if id(p) in own} if own else set()
        self.absent = {n for n, p in places.items() if id(p) in absent} if absent else set()
        self._parts: dict[tuple[int, int], tuple[TensorType, TensorType]] = {}  # global and local type, by the ids of type and placement

    @staticmethod
    def of(program: Program, ctx: RunContext) -> RankView | None:
        """None for a program without placements. Also None without groups: placements are then annotations for a transpile."""
        places = {n: p for b in program.blocks for n, d in b.descs.items() if (p := d.placement)}
        if not places or not program.groups:
            return None
        descs = {n: d for b in program.blocks for n, d in b.descs.items()} if len(program.blocks) > 1 else program.global_block().descs
        return RankView(program, descs, places, ctx.coords())

    def _ranks(self, group: str) -> int:
        return self.coords[group][1] if group in self.coords else 0

    def type_of(self, name: str, whole: TensorType) -> TensorType:
        """The local type of a value."""
        placement = self.places.get(name)
        if placement is None:
            return whole
        alike = id(whole), id(placement)
        if (known := self._parts.get(alike)) is not None:
            return known[1]
        try:
            part = self.program.shared(local_type(whole, placement, self.coords))
            self._parts[alike] = whole, part
            return part
        except KeyError as e:
            raise ProgramError(f"{self.program.label()}: %{name} is placed over {e}, a group that this rank is not in") from None

    def fed(self, name: str, whole: TensorType) -> TensorType:
        """The global type of a feed on this rank. For a replica-local value it has this rank's rows."""
        own = tuple([e for e in self.places.get(name, ()) if e.is_own])
        return local_type(whole, feed_placement(own), self.coords) if own else whole

    def is_empty(self, name: str) -> bool:
        """Does this rank hold no element of a value, whatever its open sizes? A state variable exists even if it is empty."""
        if name in self.absent:
            return True
        return name in self.cut and not self.descs[name].persistable and 0 in self.type_of(name, self.descs[name].type).shape

    def is_cut(self, name: str, axis: int) -> bool:
        """Do ranks hold slices of a value along an axis, or pieces of it?"""
        return name in self.cut and any(e.bounds is not None or e.axis == axis for e in self.places[name])

    def state_type(self, name: str, declared: TensorType, have: TensorType) -> TensorType:
        """The global type of a state variable whose local value has type `have`. Open axes that are sharded stay open."""
        if ANY not in declared.shape or len(declared.shape) != len(have.shape):
            return declared
        cut = {e.axis for e in self.places[name]}
        return declared.with_shape(h if d == ANY and k not in cut else d for k, (d, h) in enumerate(zip(declared.shape, have.shape)))

    def is_local_rule(self, op: Operator, definition: type[OpDef]) -> bool:
        """Does the operator's type rule work on local types? Yes for messages, and for `local` values, which have no global meaning."""
        if definition.effect is Effect.P2P:
            return True
        return not (self.own.isdisjoint(op.input_arg_names) and self.own.isdisjoint(op.output_arg_names))

    def touches(self, op: Operator) -> bool:
        """Does the operator read or write a value that has a placement?"""
        keys = self.places.keys()
        return not (keys.isdisjoint(op.input_arg_names) and keys.isdisjoint(op.output_arg_names))

    # -- one operator -------------------------------------------------------------------------------------------------------

    def local_op(self, op: Operator, definition: type[OpDef], types: Mapping[str, TensorType]) -> LocalOp | None:
        """The operator as this rank runs it; None if it runs unchanged. `types` are the local types, also of the outputs."""
        if self.cut.isdisjoint(op.input_arg_names) and self.cut.isdisjoint(op.output_arg_names):
            return None
        local = definition.comm.move is not None or definition.control.bodies or self.is_local_rule(op, definition)
        if local or definition.effect not in _PART_OPS:
            return None
        ins = definition.flat_slots(op.inputs, definition.in_slots)
        outs = definition.flat_slots(op.outputs, definition.out_slots)
        p = _pattern(definition, self._declared(ins), self._declared(outs), op.attrs)
        in_types, out_types = _pick(types, ins), _pick(types, outs)
        ghosts = self._ghosts(p, ins, in_types, out_types) if p.shape_only else {}
        for k, t in ghosts.items():
            in_types[k] = t
        part = None
        if p.needs_part:
            wholes_in, wholes_out = self._wholes(ins, types), self._wholes(outs, types)
            part = part_of(p, wholes_in, self._places(ins), wholes_out, self._places(outs), self.coords)
        attrs = op.attrs
        if definition.comm.local_attrs is not None:
            attrs = definition.comm.local_attrs(attrs, [t and t.shape for t in in_types], [t and t.shape for t in out_types])
        made = [k for k, t in enumerate(out_types) if t is not None and 0 not in t.shape]
        if not made:
            return LocalOp(attrs, part, ghosts, skip=True)
        fills = self._fills(p, ins, in_types, outs, out_types, made)
        if part is None and not ghosts and attrs is op.attrs and not fills:
            return None
        return LocalOp(attrs, part, ghosts, False, fills)

    def _declared(self, names: Sequence[str | None]) -> tuple[TensorType | None, ...]:
        return tuple(None if n is None else self.descs[n].type for n in names)

    def _wholes(self, names: Sequence[str | None], types: Mapping[str, TensorType]) -> list[TensorType | None]:
        return [None if n is None else self.wholes.get(n) or types[n] for n in names]

    def _places(self, names: Sequence[str | None]) -> list[Placement]:
        return [() if n is None else self.places.get(n, ()) for n in names]

    def _ghosts(
        self, p: Pattern, ins: list[str | None], in_types: list[TensorType | None], out_types: list[TensorType | None]
    ) -> dict[int, TensorType]:
        """Local types for the operands of which only the shape is read. They fit the parts of the other operands."""
        sizes, whole = _extents(p, in_types, out_types)
        out = {}
        for k in p.shape_only:
            n, t = ins[k], in_types[k]
            axes = p.ins[k]
            if n is None or t is None or axes is None:
                continue
            global_shape = (self.wholes.get(n) or t).shape
            shape: tuple[int, ...]
            if whole is not None:
                shape = whole if any(axes) else global_shape
            else:
                shape = tuple(_extent(factors, d, sizes) for factors, d in zip(axes, global_shape, strict=True))
            out[k] = t.with_shape(shape)
        return out

    def _fills(
        self, p: Pattern, ins: list[str | None], in_types: list[TensorType | None], outs: list[str | None],
        out_types: list[TensorType | None], made: list[int],
    ) -> tuple[tuple[int, Any], ...]:  # fmt: skip
        """For outputs that are terms of a reduction: its identity, if this rank's part of an operand is empty; () if the kernel is
        called."""
        empty = [n for k, (n, t) in enumerate(zip(ins, in_types, strict=True)) if n and t and 0 in t.shape and k not in p.shape_only]
        cutting = {e.group for n in empty for e in self.places.get(n, ()) if e.is_cut}
        fills = []
        for k in made if cutting else ():
            n, t = outs[k], out_types[k]
            assert n is not None and t is not None
            rest = next((e for e in self.places.get(n, ()) if e.op and e.group in cutting), None)
            if rest is None:
                return ()
            fills.append((k, identity(rest.op, np_dtype(t.dtype))))
        return tuple(fills)


def _pick(types: Mapping[str, TensorType], names: Sequence[str | None]) -> list[TensorType | None]:
    return [None if n is None else types[n] for n in names]


_PATTERNS: dict[Any, Pattern] = {}


def _pattern(definition: type[OpDef], ins: tuple, outs: tuple, attrs: Mapping[str, Any]) -> Pattern:
    key = definition.name, ins, outs, attrs_key(attrs)
    p = _PATTERNS.get(key)
    if p is None:
        if len(_PATTERNS) > 50_000:
            _PATTERNS.clear()
        p = _PATTERNS[key] = definition.pattern_of(ins, outs, attrs)
    return p


def _extents(
    p: Pattern, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]
) -> tuple[dict[Any, int], tuple[int, ...] | None]:
    """Local sizes of factors and of axes made of several factors; and the shape of the flat range if operands are flat ranges."""
    sizes: dict[Any, int] = {}
    for k, (axes, t) in enumerate(zip((*p.ins, *p.outs), (*ins, *outs), strict=True)):
        if axes is None or t is None or (k < len(p.ins) and k in p.shape_only):
            continue
        if len(axes) != len(t.shape):
            return sizes, t.shape
        for factors, d in zip(axes, t.shape, strict=True):
            key = factors[0] if len(factors) == 1 else factors
            if sizes.get(key, 1) == 1:
                sizes[key] = d
    for factors, d in [(f, d) for f, d in sizes.items() if isinstance(f, tuple)]:
        unknown = [f for f in factors if f not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = d // max(1, prod(sizes[f] for f in factors if f in sizes))
    return sizes, None


def _extent(factors: tuple[str, ...], whole: int, sizes: Mapping[Any, int]) -> int:
    if factors in sizes:
        return sizes[factors]
    if factors and all(f in sizes for f in factors):
        return prod(sizes[f] for f in factors)
    return whole


def identity(op: str, dtype: np.dtype) -> Any:
    """The identity of a reduction: 0 for a sum, the smallest value for a maximum.

    >>> identity("max", np.dtype("float32")), identity("min", np.dtype("int8"))
    (-inf, 127)
    """
    if op == "sum":
        return 0
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max)
    if dtype.kind == "b":
        return op == "min"
    return -np.inf if op == "max" else np.inf
