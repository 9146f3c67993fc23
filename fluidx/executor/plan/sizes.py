"""Size inference: the local type of every value of a run on one rank, from the feeds and the arrays of the scope."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...ir import flow
from ...ir.dtypes import dtype_name
from ...ir.errors import FeedError, NotInitializedError, ProgramError
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator
from ...ir.program import Block, Program
from ...ir.sizes import with_open_axes
from ...ir.sub_blocks import bodies
from ...ir.types import ANY, TensorType, show_placement
from ...ir.var import Var
from ..context import RunContext
from ..error_text import site
from ..open_axes import OpenAxes
from .liveness import op_reads
from .rank_view import LocalOp, RankView
from .selection import Outline
from .signatures import RankSignatures


class SizesChange(ProgramError):
    """A sub-block of operator `op` changes the size of a value, so `op` must be planned iteration by iteration."""

    def __init__(self, message: str, op: Operator):
        super().__init__(message)
        self.op = op


class RankSizes:
    """`types`: the local types of values. `here`: by operator id, operators that this rank runs differently.

    `held` are the variables of the scope; only their shapes and dtypes are used.
    """

    def __init__(self, program: Program, held: Mapping[str, Any], ctx: RunContext):
        self.program, self.held = program, held
        self.block = program.global_block()
        self.nested = len(program.blocks) > 1
        self.local = RankView.of(program, ctx)
        self.types: dict[str, TensorType] = {}
        self.here: dict[int, LocalOp] = {}
        self._signatures = None if self.local is None else RankSignatures(program, self.local, self.types, self.here)
        self._held_types: dict[Hashable, tuple[TensorType | None, TensorType]] = {}  # global and local types of state
        self._reads: tuple[Outline, Sequence[Sequence[str]]] | None = None
        self.uninitialized: list[str] = []
        self.open_axes: OpenAxes

    def infer(self, outline: Outline, feed_types: Mapping[str, TensorType]) -> None:
        """Fill `types` and `here`. Raises NotInitializedError for state that is read but has no value, and SizesChange if the size of a
        value changes between iterations of a loop, or differs between branches."""
        for n, t in feed_types.items():
            self.define(n, t if self.local is None else self.local.fed(n, t))
        self.open_axes = outline.fact(OpenAxes)
        self._infer_ops(outline.ops, outline.fact(_rules) if self.local is None else None, self.block)
        for n in outline.fetch:
            if n not in self.types:
                self.known(n, None)
        if self.uninitialized:
            names = list(dict.fromkeys(self.uninitialized))
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise NotInitializedError(
                f"{listed} {'has' if len(names) == 1 else 'have'} no value in this scope; run the startup program first: "
                "exe.run(startup), or run_startup() on many ranks"
            )

    def whole(self, name: str) -> TensorType:
        """The global type of a value."""
        t = self.local.wholes.get(name) if self.local is not None else None
        return t or self.types[name]

    def only_on_others(self, name: str) -> bool:
        """Do only other ranks hold elements of the value?"""
        return self.local is not None and name not in self.held and self.local.is_empty(name)

    def _is_cut(self, name: str, axis: int) -> bool:
        return self.local is not None and self.local.is_cut(name, axis)

    def reads(self, op: Operator) -> Iterable[str]:
        """The values that an operator and its sub-blocks read, without those of which only the shape is read."""
        here = self.here.get(id(op))
        return flow.reads(self.program, op) if here is None or not here.ghosts else here.real_inputs(op, opdef(op.type))

    def all_reads(self, outline: Outline) -> Sequence[Sequence[str]]:
        """The same for each operator of an outline."""
        every, here = outline.fact(op_reads), self.here
        if not here:
            return every
        if self._reads is None or self._reads[0] is not outline:
            own = [
                names if (found := here.get(id(op))) is None or not found.ghosts else found.real_inputs(op, opdef(op.type))
                for op, names in zip(outline.ops, every, strict=True)
            ]
            self._reads = outline, own
        return self._reads[1]

    def define(self, name: str, whole: TensorType) -> None:
        """Set the type of a value from its global type."""
        whole = self.program.shared(whole)
        if self.local is not None and name in self.local.places:
            self.local.wholes[name] = whole
            self.types[name] = self.local.type_of(name, whole)
        else:
            self.types[name] = whole

    def known(self, name: str, op: Operator | None) -> TensorType:
        """The local type of a value that is read."""
        t = self.types.get(name)
        if t is not None:
            return t
        d = self.block.find(name) or (self.local.descs.get(name) if self.local is not None else None)
        if d is not None and d.persistable and self.local is None and (found := self.held.get(name)) is not None:
            if _type(found, d.type) is d.type:
                t = self.types[name] = self.program.shared(d.type)
                return t
        if d is not None and self.only_on_others(name) and d.type.numel >= 0:
            self.define(name, d.type)  # for example the operand of a broadcast from another rank: its value is not read
            return self.types[name]
        if d is not None and d.persistable:
            whole, want = d.type, d.type
            found = self.held.get(name)
            if found is not None and self.local is not None and self._is_held_alike(name, alike := _held_key(d, found)):
                return self.types[name]
            have = None if found is None else _type(found, d.type)
            if self.local is not None and name in self.local.places:
                whole = whole if have is None else self.local.state_type(name, whole, have)
                want = self.local.type_of(name, whole)
            if have is None:
                self.uninitialized.append(name)
            elif not want.accepts(have):
                part = "" if want == whole else f" on this rank, its part of {d.type}"
                raise FeedError(f"variable {name!r} is declared {want}{part}, this scope holds {have}; run the startup program again")
            self.define(name, whole if have is None or want is not whole else have)
            if found is not None and self.local is not None:
                self._held_types[alike] = self.local.wholes.get(name), self.types[name]
            return self.types[name]
        if op is None:
            raise ProgramError(f"variable {name!r} has no value to fetch: no operator defines it")
        raise ProgramError(f"op {op.type} reads {name!r} before any operator defines it{site(op)}")

    def _is_held_alike(self, name: str, alike: Hashable) -> bool:
        """Set the type of a state variable if one of the same declaration has an array of the same shape and dtype."""
        known = self._held_types.get(alike)
        if known is None or self.local is None:
            return False
        whole, self.types[name] = known
        if whole is not None:
            self.local.wholes[name] = whole
        return True

    def _infer_ops(self, ops: Sequence[Operator], rules: Sequence[_Rule] | None, block: Block, within: Operator | None = None) -> None:
        """Infer the types of operators in `block`. `rules`: those of the operators, if they are cached. `within`: the operator of block 0
        that runs the block."""
        types, signatures = self.types, self._signatures
        for k, op in enumerate(ops):
            definition = opdef(op.type)
            if definition.control.bodies:
                self._infer_control(op, within or op)
                continue
            for n in op.input_arg_names:
                if n not in types:
                    self.known(n, op)
            if signatures is None:
                self._infer_op(rules[k] if rules is not None else _Rule.of(op), block, within)
            elif not signatures.answer(op, signature := signatures.of(op, definition)):
                self._infer_op(_Rule.of(op), block, within)
                signatures.keep(op, definition, signature)

    def _infer_op(self, rule: _Rule, block: Block, within: Operator | None) -> None:
        """Infer the types of the results of one operator without sub-blocks."""
        types, (op, definition, reads, write) = self.types, rule
        if len(op.input_arg_names) > 1 and any(1 in types[n].shape for n in op.input_arg_names if types[n].__class__ is TensorType):
            self.open_axes.check(block, op, definition, self.whole, self._is_cut)
        ins = [types[n] for n in reads] if reads is not None else definition.arrange(op.inputs, value=types.__getitem__)
        try:
            if self.local is not None and self.local.touches(op):
                self._infer_placed(self.local, op, definition, ins)
                return
            made = self.program.infer(definition, ins, op.attrs)
        except ProgramError as e:
            self.open_axes.check(block, op, definition, self.whole, self._is_cut)
            raise with_sizes(e, op) from None
        for n, t in ((write, made),) if write else by_name(op, definition, made):
            old = types.get(n, t)
            if old is not t and old != t:
                raise _changed(f"op {op.type} writes {t} into {n!r}, which holds {old}", op, within)
            types[n] = t

    def _infer_control(self, op: Operator, within: Operator) -> None:
        """Infer the sub-blocks first. A result must have the same type in all of them."""
        for b in op.sub_blocks():
            block = self.program.blocks[b]
            self._infer_ops(block.oplist, None, block, within)
        handed = {body.attr: body.results(op) for body in bodies(op) if body.results_attr}
        for k, n in enumerate(op.output_arg_names if handed else ()):
            made = {attr: self.known(names[k], op) for attr, names in handed.items()}
            if len(set(made.values())) > 1:
                found = " and ".join(f"{t} in {attr}" for attr, t in made.items())
                raise _changed(f"op {op.type}: {n!r} is {found}", op, within)
            self.define(n, self.whole(next(iter(handed.values()))[k]))
        for n in op.input_arg_names:
            self.known(n, op)

    def _infer_placed(self, local: RankView, op: Operator, definition: type[OpDef], ins: list[Any]) -> None:
        """Types of results with placements. The type rule gets global types, or local types for `local` values and messages."""
        if local.is_local_rule(op, definition):
            if definition.control.open_axes is not None:
                self._fill_open(local, op, definition)
                return
            for n, t in self._results(op, definition, ins):
                self._define_part(local, op, n, t)
        else:
            for n, t in self._results(op, definition, definition.arrange(op.inputs, value=self.whole)):
                if n in self.types and self.whole(n) != t:
                    raise ProgramError(f"op {op.type} writes {t} into {n!r}, which holds {self.whole(n)}")
                self.define(n, t)
        here = local.local_op(op, definition, self.types)
        if here is not None:
            self.here[id(op)] = here

    def _fill_open(self, local: RankView, op: Operator, definition: type[OpDef]) -> None:
        """Types of results whose open axes take global sizes from other variables, as the operator's attributes say."""
        assert definition.control.open_axes is not None
        axes = definition.control.open_axes(op.attrs)
        for n, t in self._results(op, definition, []):
            declared = local.descs[n].type
            if ANY in declared.shape and n not in local.own:
                missing = next((name for name, _, _ in axes if name not in self.types), None)
                if missing is not None:
                    raise FeedError(f"feed is missing variable {missing!r}; op {op.type} needs its size for the size of {n!r}{site(op)}")
                self.define(n, with_open_axes(declared, axes, lambda name: self.whole(name).shape))
                t = self.types[n] if self.types[n].accepts(t) else t
            self._define_part(local, op, n, t)

    def _results(self, op: Operator, definition: type[OpDef], ins: list[Any]) -> list[tuple[str, TensorType]]:
        return by_name(op, definition, self.program.infer(definition, ins, op.attrs))

    def _define_part(self, local: RankView, op: Operator, name: str, t: TensorType) -> None:
        """Set the type of a value from its local type."""
        if name in local.own or name not in local.places:
            if self.types.get(name, t) != t:
                raise ProgramError(f"op {op.type} writes {t} into {name!r}, which holds {self.types[name]}")
            self.types[name] = t
            return
        if name not in self.types:
            self.define(name, local.descs[name].type)
        if self.types[name] != t:
            raise ProgramError(
                f"op {op.type} writes {t} into {name!r}, but this rank's part is {self.types[name]}, of {self.whole(name)} "
                f"{show_placement(local.places[name])}"
            )


class _Rule(NamedTuple):
    """An operator with its declaration. `reads`: its inputs in the order of arguments, if each slot has exactly one (else None). `write`:
    its single output (else "")."""

    op: Operator
    definition: type[OpDef]
    reads: tuple[str, ...] | None
    write: str

    @staticmethod
    def of(op: Operator) -> _Rule:
        definition = opdef(op.type)
        ins, slots, made, outs = op.inputs, definition.in_slots, op.output_arg_names, definition.out_slots
        reads = None
        if not definition.many_ins and len(ins) == len(slots) == len(op.input_arg_names):
            reads = tuple([ins[name][0] for name, _, _ in slots])
        return _Rule(op, definition, reads, made[0] if len(outs) == len(made) == 1 and not outs[0].many else "")


def _changed(message: str, op: Operator, within: Operator | None) -> ProgramError:
    if within is None:
        return ProgramError(message + site(op))
    return SizesChange(f"{message}; Executor.run plans op {within.type} round by round, ranks and single plans do not{site(op)}", within)


def with_sizes(error: ProgramError, op: Operator) -> ProgramError:
    """The error of a type rule, with the names of operands in place of their slots, and a note that sizes come from the feeds."""
    text = str(error)
    for slot, names in op.inputs.items():
        if len(names) == 1:
            text = text.replace(f"of {slot} ", f"of {names[0]!r} ")
    return ProgramError(f"{text}\n  in op {op.type}, with the sizes that were fed{site(op)}")


def by_name(op: Operator, definition: type[OpDef], results: Any) -> list[tuple[str, TensorType]]:
    """(name, type) for each result of the type rule."""
    out: list[tuple[str, TensorType]] = []
    for (slot, _, many), result in zip(definition.out_slots, (results,) if len(definition.out_slots) == 1 else results, strict=True):
        out += zip(op.outputs.get(slot, ()), result if many else (result,), strict=False)
    return out


def _rules(outline: Outline) -> list[_Rule]:
    return [_Rule.of(op) for op in outline.ops]


def _held_key(d: Var, a: Any) -> Hashable:
    return id(d.type), id(d.placement), a.dtype, a.shape


def _type(a: Any, declared: TensorType) -> TensorType:
    """The type of an array; the object `declared` itself if it is equal."""
    dtype, shape = dtype_name(a.dtype), tuple(a.shape)
    return declared if dtype == declared.dtype and shape == declared.shape else TensorType(dtype, shape)
