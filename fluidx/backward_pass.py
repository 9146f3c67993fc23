"""BackwardPass: one walk over the operators of a block that appends the operators of gradients. `fluidx.backward` has the public
functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ._checks import wrong
from ._collector import collections_paused
from .ir import ANY, OPS, Block, Builder, OpDef, Operator, ProgramError, Role, TensorType, Var, Variable, flow, nearest, opdef
from .ir.flow import listed
from .ir.memory_spaces import elements_read
from .ir.operator import rename_slots
from .ir.sub_blocks import runs_bodies
from .ir.unique_name import unused
from .ir.valuetypes import SequenceType
from .recompute_segments import RecomputedValues, Segments, at_variables, automatic

_SUMMED_BY = {SequenceType: "sequence_sum"}  # the op that adds gradients of a type; for tensors it is sum
_BESIDE = (Role.OPTIMIZE, Role.LR_SCHED, Role.DIST)  # operators of these roles are not differentiated


@dataclass(slots=True)
class GradientTerm:
    """One contribution to a variable's gradient: a value, and the range of the operators that compute it.

    `owned`: nothing outside `[start, stop)` refers to the value, so that it may be renamed.
    """

    name: str
    start: int = 0
    stop: int = 0
    owned: bool = False


@dataclass(slots=True)
class GradientView:
    """The differentiated operator, as a gradient builder gets it: `view["X"]` is a Variable, a list for a list slot, or None."""

    walk: BackwardPass
    op: Operator
    index: int
    attrs: Mapping[str, Any]
    hazards: set[str] = field(default_factory=set)

    def __getitem__(self, slot: str) -> Any:
        op, value = self.op, self.walk.recomputed.value
        definition = OPS[op.type]
        declared = definition.slot_of.get(slot)
        if declared is None:
            raise ProgramError(f"op {op.type} has no slot {slot!r}; {nearest(slot, [*definition.inputs, *definition.outputs], 'it has')}")
        names = op.inputs.get(slot, ())
        for n in names:
            if n in op.output_arg_names:
                self.hazards.add(n)
        names = names or op.outputs.get(slot, ())
        if declared.many:
            return [value(n, self.index) for n in names]
        return value(names[0], self.index) if names else None

    @contextmanager
    def ahead(self, block: Block) -> Iterator[None]:
        """A context: operators written to `block` are moved before the differentiated operator, or to the front of a block that it runs."""
        start = len(block.oplist)
        yield
        self.walk.ahead.setdefault((self.index, block.idx), []).extend(block.oplist[start:])
        del block.oplist[start:]

    def gradients(self, targets: list[Variable], inputs: list[Variable], target_gradients: list[Variable]) -> list[Variable | None]:
        """`fluidx.gradients`, for an op that differentiates its own sub-blocks."""
        return self.walk.gradients(targets, inputs, target_gradients)

    def needs(self, slot: str) -> bool:
        """Is the gradient of an input slot needed? A gradient that a builder computes for other slots is dropped."""
        return any(map(self.wants, self.op.inputs.get(slot, ())))

    def wants(self, name: str) -> bool:
        """Is the gradient of the input of that name needed?"""
        return name in self.walk.live[self.index]


class BackwardPass:
    """One backward pass over the operators that a block has when it starts. `gradients` is `fluidx.gradients`, for ops with sub-blocks."""

    def __init__(
        self,
        block: Block,
        leaves: set[str],
        no_grad: set[str],
        gradients: Callable[..., list[Variable | None]],
        callbacks: Sequence[Callable[..., None]] | None = None,
        checkpoints: set[str] | str = "",
        parameters: set[str] | frozenset[str] = frozenset(),
    ):
        self.block = block
        self.ops = list(block.oplist)
        self.vars_before = dict(block.descs)
        self.blocks_before = block.program.num_blocks
        self.b = Builder(block, role=Role.BACKWARD)
        self.leaves = leaves - no_grad
        self.gradients = gradients
        self.parameters = parameters
        self.callbacks = callbacks or ()
        self.terms: dict[str, list[GradientTerm]] = {}
        self.final: dict[str, Variable] = {}  # finished gradients of the leaves, by name
        self.reached: set[str] = set()
        self.passed_on: set[str] = set()
        self.last_write: dict[str, int] = {}
        self.depends = set(self.leaves)  # names that depend on a leaf, after all operators
        # (operator k, block) -> operators to put before k, or first in a block that it runs
        self.ahead: dict[tuple[int, int], list[Operator]] = {}
        self.live: list[tuple[str, ...]] = []  # for each operator, the inputs that depend on a leaf when it runs
        self._sweep(no_grad)
        self.recomputed = RecomputedValues(block, self.ops, self.last_write, self._segments(checkpoints))

    def _segments(self, checkpoints: set[str] | str) -> Segments:
        """The segments of recomputation: "auto", the names of variables that are kept, or nothing."""
        if checkpoints == "auto":
            return automatic(self.block, self.ops, self.live)
        for name in checkpoints:
            if name not in self.last_write:
                raise wrong(f"append_backward: the checkpoint {name!r} is not computed by any operator")
        return at_variables(self.last_write, set(checkpoints))

    # -- what to differentiate ----------------------------------------------------------------------------------------------

    def _sweep(self, no_grad: set[str]) -> None:
        """Walk forward: find the names that depend on a leaf. A stop_gradient that does not follow from the inputs was set by the user."""
        program, find, depends = self.block.program, self.block.find, self.depends
        for i, op in enumerate(self.ops):
            beside = op.role in _BESIDE
            constant = (definition := OPS.get(op.type)) is not None and definition.rewrite.constant
            live = () if beside or constant else tuple(n for n in flow.reads(program, op) if n in depends)
            self.live.append(live)
            for n in flow.writes(program, op):
                self.last_write[n] = i
                if beside:
                    continue
                if not live or n in no_grad:
                    if n not in self.leaves:
                        depends.discard(n)  # overwritten by a value that depends on no leaf
                    continue
                desc = find(n)
                if desc is None or not desc.type.is_float:
                    continue
                cut = desc.stop_gradient and op.role != Role.BACKWARD
                if cut and any(not d.stop_gradient for d in map(find, op.input_arg_names) if d is not None):
                    continue
                depends.add(n)

    def reach(self) -> None:
        """Walk backward: find the operators on paths from leaves to targets, and the first reader of each name on them."""
        wanted = set(self.terms)
        self.path = [False] * len(self.ops)
        self.first_use: dict[str, int] = {}
        for i in range(len(self.ops) - 1, -1, -1):
            op = self.ops[i]
            if op.role in _BESIDE or not any(n in wanted for n in op.output_arg_names):
                continue
            wanted.difference_update(op.output_arg_names)  # an earlier value of the name is a different value
            if self.live[i]:
                self.path[i] = True
                for n in self.live[i]:
                    wanted.add(n)
                    self.first_use[n] = i
        self.reached = self.leaves & (wanted | set(self.first_use) | set(self.terms))

    def why_not(self, parameters: Sequence[Variable]) -> str:
        if not self.block.program.all_parameters():
            return f"{self.block.program.label()} has no parameters"
        if not parameters:
            return "no parameter is trainable"
        cut = [n for n in self.last_write if n not in self.depends and self._is_cut(n)]
        if cut:
            return f"the path is cut at {', '.join(repr(n) for n in cut[:3])}, where stop_gradient is set"
        return "no operator connects them"

    def _is_cut(self, name: str) -> bool:
        desc = self.block.find(name)
        if desc is None or not desc.stop_gradient or not desc.type.is_float:
            return False
        return any(n in self.depends for n in self.ops[self.last_write[name]].input_arg_names)

    def seed(self, target: Variable) -> None:
        """Start from `target` with a gradient of ones."""
        start = len(self.block.oplist)
        at = self.last_write.get(target.name)
        self._write_for(None if at is None else self.ops[at])
        if ANY in target.shape:
            g = self.b.fill_any_like(target, value=1.0)
        else:
            g = self.b.fill_constant(shape=target.shape, dtype=target.dtype, value=1.0)
        self.terms.setdefault(target.name, []).append(GradientTerm(g.name, start, start + 1, True))

    def weigh(self, target: Variable, gradient: Variable) -> None:
        """Start from `target` with an existing gradient."""
        self.terms.setdefault(target.name, []).append(GradientTerm(gradient.name))

    def undo(self) -> None:
        """Restore the program, before an error is raised."""
        self.block.program.drop_blocks(self.blocks_before)
        del self.block.oplist[len(self.ops) :]
        self.block.oplist[:] = self.ops
        self.block.descs.clear()
        self.block.descs.update(self.vars_before)

    # -- the pass -------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            with self.block.program.role_guard(Role.BACKWARD), collections_paused():
                for i in range(len(self.ops) - 1, -1, -1):
                    if self.path[i]:
                        self._differentiate(i, self.ops[i])
                    elif self.ops[i].role not in _BESIDE:
                        for name in self.ops[i].output_arg_names:  # a constant: its gradient is dropped
                            if name not in self.leaves:
                                self.terms.pop(name, None)
                for name in sorted(self.leaves & set(self.terms)):  # a leaf that is itself a target, or written but never read
                    self._finish_leaf(name)
                self._put_ahead()
                self.block.program.empty_blocks(self.blocks_before)  # sub-blocks of dropped operators
        except BaseException:
            self.undo()
            raise

    def _put_ahead(self) -> None:
        """Insert the forward operators that gradients need (`ahead`); the last ones first, so that indices stay valid."""
        program, oplist = self.block.program, self.block.oplist
        for (_, idx), ops in self.ahead.items():
            if idx != self.block.idx:
                program.blocks[idx].oplist[:0] = ops
        for i in sorted({i for i, _ in self.ahead}, reverse=True):
            oplist[i : i + 1] = [*self.ahead.get((i, self.block.idx), ()), listed(program, oplist[i])]

    def _differentiate(self, i: int, op: Operator) -> None:
        definition = opdef(op.type)
        # a gradient belongs to one written value: taking it here removes it, so that a name may be written twice
        g: list[Any] = []
        flows = False
        for slot, _, many in definition.out_slots:
            values = [self._total(n, op) for n in op.outputs.get(slot, ())]
            flows = flows or any(v is not None for v in values)
            g.append(values if many else values[0] if values else None)
        if not flows:
            self._finish_uses(i, op)
            return
        if definition.grad is None:
            raise self._no_gradient(op, self.live[i])
        start = len(self.block.oplist)
        view = GradientView(self, op, i, op.attrs)
        self._write_for(op)
        try:
            result = definition.grad(self.b, view, g[0] if len(g) == 1 else tuple(g))
            found = self._pair(definition, op, result, self.live[i])
        except ProgramError as e:
            at = f" written at {op.site}" if op.site else ""
            raise ProgramError(f"{e}\n  in the gradient of {op.type}({', '.join(op.input_arg_names)}){at}") from None
        made = self._made(start, [v.name for _, v in found])
        self._check_reads(start, i, op, view.hazards)
        stop = len(self.block.oplist)
        for name, v in found:
            self.terms.setdefault(name, []).append(GradientTerm(v.name, start, stop, v.name in made))
        self._finish_uses(i, op)
        for callback in self.callbacks:
            callback(block=self.block, context={"op": op, "grads": {n: v.name for n, v in found}})

    def _pair(self, definition: type[OpDef], op: Operator, result: Any, live: tuple[str, ...]) -> list[tuple[str, Variable]]:
        """(input name, gradient) for the needed gradients that a builder returned, in slot order."""
        slots, block = definition.in_slots, self.block
        if len(slots) == 1 and not (isinstance(result, tuple) and len(result) == 1):
            result = (result,)
        if result is None:
            result = (None,) * len(slots)
        if not isinstance(result, (tuple, list)) or len(result) != len(slots):
            raise ProgramError(f"op {op.type} has {len(slots)} inputs, its gradient gave {result!r}")
        found = []
        for (slot, _, _), values in zip(slots, result, strict=True):
            if values is None:
                continue
            names, given = op.inputs.get(slot, ()), values if isinstance(values, (list, tuple)) else (values,)
            if given and len(given) != len(names) and names:
                raise ProgramError(f"op {op.type} has {len(names)} inputs {slot!r}, its gradient gave {len(given)}")
            for name, v in zip(names, given, strict=False):
                if v is None or name not in live:
                    continue
                want, got = block.desc(name).type, v.desc.type
                if want is not got and not want.accepts(got):
                    raise ProgramError(f"op {op.type}: the gradient of {slot} must be {want} like {name!r}, {v.name!r} is {got}")
                found.append((name, v))
        return found

    def _made(self, start: int, results: list[str]) -> set[str]:
        """Drop unread operators from `start` on. Returns the results that may be renamed, because nothing else refers to them."""
        read, made = set(results), set[str]()
        unread = shared = False
        for o in reversed(self.block.oplist[start:]):
            outs = o.output_arg_names
            unread = unread or not read.issuperset(outs)
            shared = shared or runs_bodies(o)  # its blocks may read them
            made.update(outs)
            read.update(o.input_arg_names)
        if unread:
            self._drop_unused(start, set(results))
        return set() if shared else {n for n in results if n in made and n not in self.recomputed.originals and results.count(n) == 1}

    def _drop_unused(self, start: int, used: set[str]) -> None:
        """Remove operators from `start` on whose results are not read, and optional outputs that are not read."""
        program, oplist = self.block.program, self.block.oplist
        tail = oplist[start:]
        kept = flow.live_ops(program, used, partial(flow.acts, program), ops=tail)
        for n in set(flow.definitions(program, tail)).difference(flow.definitions(program, kept)):
            self._forget(n)
        # other results of a recomputed operator stay: an earlier operator's gradient may read them
        read = used.union(self.recomputed.originals, flow.uses(program, kept))
        for k, o in enumerate(kept):
            optional = [s.name for s in OPS[o.type].out_slots if s.optional and s.name in o.outputs]
            gone = [s for s in optional if read.isdisjoint(o.outputs[s])]
            if gone:
                for s in gone:
                    for n in o.outputs[s]:
                        self._forget(n)
                kept[k] = o.replace(outputs={s: names for s, names in o.outputs.items() if s not in gone})
        oplist[start:] = kept

    def _forget(self, name: str) -> None:
        if name not in self.vars_before:
            self.block.descs.pop(name, None)
        self.recomputed.forget(name)

    def _write_for(self, op: Operator | None) -> None:
        """Give the operators that are written from now on the line and the device of `op`."""
        self.b.site, self.b.device = (op.site, op.device) if op is not None else (None, "")

    def _check_reads(self, start: int, i: int, op: Operator, in_place: set[str]) -> None:
        """Raise ProgramError if a gradient would read a forward value after it was overwritten."""
        if op.sub_blocks():
            in_place = set()  # a loop's gradient chooses the right value of a variable itself
        for o in self.block.oplist[start:]:
            for n in o.input_arg_names:
                last = self.last_write.get(n, -1)
                if (last > i or n in in_place) and (runs_bodies(o) or n in elements_read(o, self.block)):
                    writer = self.ops[last]
                    at = f" at {writer.site}" if writer.site else ""
                    optimize = writer.role == Role.OPTIMIZE
                    hint = "append the backward of every loss before the first update" if optimize else "write to another variable there"
                    raise wrong(f"the gradient of {op.type} needs {n!r}, which {writer.type} overwrites{at}; {hint}")

    def _no_gradient(self, op: Operator, ways: tuple[str, ...]) -> ProgramError:
        outs = [n for n in op.output_arg_names if self.block.desc(n).type.is_float]
        at = f"\n  written at {op.site}" if op.site else ""
        return ProgramError(
            f"op {op.type} has no gradient, and the loss reaches {', '.join(map(repr, ways))} through its output"
            f" {', '.join(map(repr, outs))}; set stop_gradient on that output if it is meant to be constant{at}"
        )

    # -- finishing a gradient --------------------------------------------------------------------------------------------------

    def _finish_uses(self, i: int, op: Operator) -> None:
        """Finish the leaves whose last contribution came from operator `i`, so that they are ready as early as possible."""
        for n in op.input_arg_names:
            if n in self.leaves and self.first_use.get(n) == i:
                self._finish_leaf(n)

    def _finish_leaf(self, name: str) -> None:
        terms = self.terms.pop(name, None)
        if not terms:
            return
        self.final[name] = self._merge(name, terms, own_name=True, finishes=name in self.parameters)

    def _total(self, name: str, writer: Operator) -> Variable | None:
        """The gradient of a value that `writer` wrote; None if it has none."""
        terms = self.terms.pop(name, None)
        if terms is None:
            # a requested value that is computed from another one: its finished gradient is passed on, once
            done = self.final.get(name) if name not in self.passed_on else None
            self.passed_on.add(name)
            return done
        leaf = name in self.leaves
        g = self._merge(name, terms, own_name=leaf)
        limits = self.block.desc(name).attrs.get("error_clip")
        if limits is not None:
            self._write_for(writer)
            g = self.b.clip(g, min=limits[0], max=limits[1])
        if leaf:
            self.final[name] = g
            self.passed_on.add(name)
        return g

    def _merge(self, name: str, terms: list[GradientTerm], own_name: bool, finishes: bool = False) -> Variable:
        """The sum of the contributions to the gradient of `name`. With `finishes` the operator that computes it gets `role_var`."""
        block, (first, *others) = self.block, terms
        if not (own_name or others or first.owned):
            return block.var(first.name)
        # a gradient in a sub-block has a name that no gradient outside has
        target = self._free_name(f"{name}@GRAD" if block.idx == 0 else f"{name}@GRAD@block{block.idx}")
        role_var = (name, target) if finishes else ()
        type_ = block.desc(name).type
        if first.owned and not others:
            self._rename(first, target, type_, role_var)
            return block.var(target)
        if others:
            for k, t in enumerate(terms):
                if t.owned:
                    self._rename(t, self._free_name(f"{name}@GRAD@RENAME@block{block.idx}@{k}"), block.desc(t.name).type)
        self._write_for(block.oplist[terms[-1].stop - 1] if terms[-1].stop else None)
        self.b.role_var = role_var
        if others:
            self.b.emit(_SUMMED_BY.get(type_.__class__, "sum"), [block.var(t.name) for t in terms], name=target)
        else:
            self.b.assign(block.var(first.name), name=target)
        self.b.role_var = ()
        block.declare(Var(target, type_, stop_gradient=True))
        return block.var(target)

    def _free_name(self, base: str) -> str:
        return unused(base, self.block.descs, lambda k: f"_{k - 1}")

    def _rename(self, term: GradientTerm, name: str, type_: TensorType, role_var: tuple[str, ...] = ()) -> None:
        """Rename a contribution, and add `role_var` to the operator that computes it."""
        oplist, old, names = self.block.oplist, term.name, {term.name: name}
        for k in range(term.start, term.stop):
            op = oplist[k]
            if old in op.output_arg_names:
                ins = rename_slots(op.inputs, names) if old in op.input_arg_names else None
                oplist[k] = op.replace(inputs=ins, outputs=rename_slots(op.outputs, names), role_var=op.role_var + role_var)
            elif old in op.input_arg_names:
                oplist[k] = op.renamed(names)
        del self.block.descs[old]
        self.block.declare(Var(name, type_, stop_gradient=True))
        term.name = name
