"""Reverse-mode differentiation of programs: `append_backward` for training, `gradients` for derivatives of anything.

One pass walks the operators backwards, asks each op's own declaration for its gradient operators, and names what comes out as fluid
does: `w@GRAD`, and `w@GRAD@RENAME@block0@0`, ... joined by one `sum` where a variable is used several times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ._checks import wrong
from ._collector import collections_paused
from .ir import (
    ANY,
    OPS,
    Block,
    Builder,
    Effect,
    OpDef,
    Operator,
    Parameter,
    ProgramError,
    Role,
    TensorType,
    Var,
    Variable,
    flow,
    nearest,
    opdef,
)
from .ir.flow import listed
from .ir.memory_spaces import elements_read
from .ir.operator import rename_slots
from .ir.sub_blocks import runs_bodies
from .ir.unique_name import unused
from .ir.valuetypes import SequenceType
from .recompute_segments import at_variables, automatic

_KEPT = (Effect.HOST, Effect.COLLECTIVE, Effect.P2P)  # operators that recompute must not run twice
_SUMMED_BY = {SequenceType: "sequence_sum"}  # the op that adds up gradients of a type; that of tensors is sum
_BESIDE = (Role.OPTIMIZE, Role.LR_SCHED, Role.DIST)  # what they write starts anew, it is not a function to differentiate


def append_backward(
    loss: Variable,
    parameter_list: Sequence[Variable | str] | None = None,
    no_grad_set: Iterable[Variable | str] | None = None,
    callbacks: Sequence[Callable[..., None]] | None = None,
    checkpoints: Sequence[Variable | str] | str | None = None,
) -> list[tuple[Parameter, Variable]]:
    """Append the operators that compute the gradient of `loss`, and return (parameter, gradient) pairs in program order.

    `loss` is one number: shape [1] or []. Without `parameter_list` the pairs are those of every trainable parameter that the loss
    depends on; the others are left out. A gradient has its parameter's type, is called `<name>@GRAD`, and the operator that finishes it
    carries `role_var=(parameter, gradient)`. Variables in `no_grad_set` count as constants. `callbacks` are called as
    `callback(block=block, context={"op": operator, "grads": {variable: gradient}})` after each operator that was differentiated.

    `checkpoints` trades time for memory: what lies between two of these variables is computed again before it is
    differentiated, so that the first copy need not be kept (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
    "auto" cuts the forward pass where few bytes are alive (checkpoints.automatic says by which rule). The answers stay the same, to the
    bit: a copy of an operator that draws random numbers draws the same.

    Raises ProgramError when the loss is not one number or is not computed in its program, when no trainable parameter
    influences it, when a parameter in `parameter_list` does not, and when an operator on the way has no gradient.
    """
    _check_variable("append_backward", "loss", loss)
    block = loss.block
    if loss.name not in block.descs or not any(loss.name in op.output_arg_names for op in block.oplist):
        raise wrong(f"append_backward: no operator of {block.program.label()} computes the loss {loss.name!r}")
    if loss.shape not in ((), (1,)):
        raise wrong(f"append_backward: the loss must be one number, of shape [1] or []; {loss.name!r} has shape {list(loss.shape)}"
                    "; layers.mean or layers.reduce_sum makes one")  # fmt: skip
    if not loss.desc.type.is_float:
        raise wrong(f"append_backward: the loss must be a float, {loss.name!r} is {loss.dtype}")
    no_grad = _name_set(block, "no_grad_set", no_grad_set)
    asked = None if parameter_list is None else [_parameter(block, p) for p in parameter_list]
    parameters = [p for p in block.program.all_parameters() if not p.stop_gradient] if asked is None else asked
    given = {d.name for d in block.descs.values() if d.is_data and not d.stop_gradient and d.type.is_float}
    walk = _BackwardPass(block, {p.name for p in parameters} | given, no_grad, callbacks, checkpoints, {p.name for p in parameters})
    at = walk.last_write[loss.name]
    if block.oplist[at].role == Role.FORWARD:
        block.oplist[at] = block.oplist[at].replace(role=Role.LOSS)
    walk.seed(loss)
    walk.reach()
    unreached = [p.name for p in asked or () if p.name not in walk.reached]
    if unreached:
        walk.undo()
        reason = "; it is in no_grad_set" if set(unreached) <= no_grad else ""
        raise wrong(f"append_backward: the loss {loss.name!r} does not depend on {', '.join(map(repr, unreached))}{reason}")
    if not walk.reached:
        walk.undo()
        raise wrong(f"append_backward: no trainable parameter influences the loss {loss.name!r}: {walk.why_not(parameters)}")
    walk.run()
    return [(p, walk.final[p.name]) for p in parameters if p.name in walk.final]


def gradients(
    targets: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    target_gradients: Variable | Sequence[Variable | None] | None = None,
    no_grad_set: Iterable[Variable | str] | None = None,
) -> list[Variable | None]:
    """Append the gradient of the sum of `targets`, and return one gradient per input, None where no target depends on it.

    `target_gradients` weighs the elements of each target; None stands for ones. The result has the inputs' types. Inputs are
    differentiated for even when their `stop_gradient` is set. Applying it to its own results gives second derivatives.
    Raises ProgramError as `append_backward` does.
    """
    ys, xs = _as_list(targets), _as_list(inputs)
    seeds = [None] * len(ys) if target_gradients is None else _as_list(target_gradients)
    for name, items in (("targets", ys), ("inputs", xs)):
        if not items:
            raise wrong(f"gradients: {name} is empty")
        for v in items:
            _check_variable("gradients", name, v)
            if v.block.program is not ys[0].block.program:
                raise wrong(f"gradients: {v.name!r} belongs to another program than {ys[0].name!r}")
    if len(seeds) != len(ys):
        raise wrong(f"gradients: {len(ys)} targets need {len(ys)} target_gradients, got {len(seeds)}")
    block = ys[0].block
    walk = _BackwardPass(block, {x.name for x in xs}, _name_set(block, "no_grad_set", no_grad_set))
    for y, seed in zip(ys, seeds, strict=True):
        if not y.desc.type.is_float:
            raise wrong(f"gradients: the target {y.name!r} is {y.dtype}; only floats have gradients")
        if seed is not None:
            _check_variable("gradients", "target_gradients", seed)
            if not y.desc.type.accepts(seed.desc.type):
                raise wrong(f"gradients: the gradient given for {y.name!r} must be {y.desc.type}, {seed.name!r} is {seed.desc.type}")
            walk.weigh(y, seed)
        else:
            walk.seed(y)
    walk.reach()
    walk.run()
    return [walk.final.get(x.name) for x in xs]


calc_gradient = gradients


@dataclass(slots=True)
class _Term:
    """One contribution to a variable's gradient: a value, and where the operators that made it stand.

    `owned` says that nothing outside `[start, stop)` refers to the value, so that it may be renamed.
    """

    name: str
    start: int = 0
    stop: int = 0
    owned: bool = False


@dataclass(slots=True)
class _View:
    """The differentiated operator as a gradient builder sees it: `view["X"]` is a Variable, a list for a list slot, or None."""

    walk: _BackwardPass
    op: Operator
    index: int
    attrs: Mapping[str, Any]
    hazards: set[str] = field(default_factory=set)

    def __getitem__(self, slot: str) -> Any:
        op, value = self.op, self.walk.value
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
        """What is written to `block` inside stands before the differentiated operator at last, or first in a block that it runs."""
        start = len(block.oplist)
        yield
        self.walk.ahead.setdefault((self.index, block.idx), []).extend(block.oplist[start:])
        del block.oplist[start:]

    def gradients(self, targets: list[Variable], inputs: list[Variable], target_gradients: list[Variable]) -> list[Variable | None]:
        """`gradients`, for an op that differentiates its own sub-blocks."""
        return gradients(targets, inputs, target_gradients)

    def needs(self, slot: str) -> bool:
        """Whether the gradient of an input slot is wanted; what a builder makes for the others is dropped."""
        return any(map(self.wants, self.op.inputs.get(slot, ())))

    def wants(self, name: str) -> bool:
        """Whether the gradient of the input of that name is wanted."""
        return name in self.walk.live[self.index]


class _BackwardPass:
    """One backward pass over the operators that a block holds when it starts."""

    def __init__(
        self,
        block: Block,
        leaves: set[str],
        no_grad: set[str],
        callbacks: Sequence[Callable[..., None]] | None = None,
        checkpoints: Sequence[Variable | str] | str | None = None,
        parameters: set[str] | frozenset[str] = frozenset(),
    ):
        self.block = block
        self.ops = list(block.oplist)
        self.vars_before = dict(block.descs)
        self.blocks_before = block.program.num_blocks
        self.b = Builder(block, role=Role.BACKWARD)
        self.leaves = leaves - no_grad
        self.parameters = parameters
        self.callbacks = callbacks or ()
        self.terms: dict[str, list[_Term]] = {}
        self.final: dict[str, Variable] = {}  # finished gradients of the leaves, by name
        self.reached: set[str] = set()
        self.passed_on: set[str] = set()
        self.last_write: dict[str, int] = {}
        self.depends = set(self.leaves)  # names that depend on a leaf, after all operators
        self.ahead: dict[tuple[int, int], list[Operator]] = {}  # to be put before operator k of the block, or first in a block that it runs
        self.live: list[tuple[str, ...]] = []  # per operator, the inputs that depend on a leaf when it runs
        self._sweep(no_grad)
        self._plan_recompute(checkpoints)

    # -- what to differentiate ----------------------------------------------------------------------------------------------

    def _sweep(self, no_grad: set[str]) -> None:
        """Forwards: which names depend on a leaf. A stop_gradient that the inputs do not explain was set by the user."""
        program, find, depends = self.block.program, self.block.find, self.depends
        for i, op in enumerate(self.ops):
            beside = op.role in _BESIDE
            constant = (definition := OPS.get(op.type)) is not None and definition.constant
            live = () if beside or constant else tuple(n for n in flow.reads(program, op) if n in depends)
            self.live.append(live)
            for n in flow.writes(program, op):
                self.last_write[n] = i
                if beside:
                    continue
                if not live or n in no_grad:
                    if n not in self.leaves:
                        depends.discard(n)  # overwritten by a value that depends on nothing
                    continue
                desc = find(n)
                if desc is None or not desc.type.is_float:
                    continue
                cut = desc.stop_gradient and op.role != Role.BACKWARD
                if cut and any(not d.stop_gradient for d in map(find, op.input_arg_names) if d is not None):
                    continue
                depends.add(n)

    def reach(self) -> None:
        """Backwards: which operators lead from a leaf to a target, and where each name is first read on the way."""
        wanted = set(self.terms)
        self.path = [False] * len(self.ops)
        self.first_use: dict[str, int] = {}
        for i in range(len(self.ops) - 1, -1, -1):
            op = self.ops[i]
            if op.role in _BESIDE or not any(n in wanted for n in op.output_arg_names):
                continue
            wanted.difference_update(op.output_arg_names)  # the value that was here before is another one
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
            return f"the way is cut at {', '.join(repr(n) for n in cut[:3])}, where stop_gradient is set"
        return "no operator connects them"

    def _is_cut(self, name: str) -> bool:
        desc = self.block.find(name)
        if desc is None or not desc.stop_gradient or not desc.type.is_float:
            return False
        return any(n in self.depends for n in self.ops[self.last_write[name]].input_arg_names)

    def seed(self, target: Variable) -> None:
        """Start from `target` with ones."""
        start = len(self.block.oplist)
        at = self.last_write.get(target.name)
        self._write_for(None if at is None else self.ops[at])
        if ANY in target.shape:
            g = self.b.fill_any_like(target, value=1.0)
        else:
            g = self.b.fill_constant(shape=target.shape, dtype=target.dtype, value=1.0)
        self.terms.setdefault(target.name, []).append(_Term(g.name, start, start + 1, True))

    def weigh(self, target: Variable, gradient: Variable) -> None:
        """Start from `target` with a gradient that exists."""
        self.terms.setdefault(target.name, []).append(_Term(gradient.name))

    def undo(self) -> None:
        """Leave the program as it was found, before an error is raised."""
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
                        for name in self.ops[i].output_arg_names:  # a constant: what flows into it ends here
                            if name not in self.leaves:
                                self.terms.pop(name, None)
                for name in sorted(self.leaves & set(self.terms)):  # a leaf that is itself a target, or written but never read
                    self._finish_leaf(name)
                self._put_ahead()
                self.block.program.empty_blocks(self.blocks_before)  # of operators that were dropped again
        except BaseException:
            self.undo()
            raise

    def _put_ahead(self) -> None:
        """Put what gradients want of the forward pass where they want it; the last operators first, for indices to hold."""
        program, oplist = self.block.program, self.block.oplist
        for (_, idx), ops in self.ahead.items():
            if idx != self.block.idx:
                program.blocks[idx].oplist[:0] = ops
        for i in sorted({i for i, _ in self.ahead}, reverse=True):
            oplist[i : i + 1] = [*self.ahead.get((i, self.block.idx), ()), listed(program, oplist[i])]

    def _differentiate(self, i: int, op: Operator) -> None:
        definition = opdef(op.type)
        # a gradient belongs to the value an operator wrote: reading it here ends it, so that names may be written twice
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
        view = _View(self, op, i, op.attrs)
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
            self.terms.setdefault(name, []).append(_Term(v.name, start, stop, v.name in made))
        self._finish_uses(i, op)
        for callback in self.callbacks:
            callback(block=self.block, context={"op": op, "grads": {n: v.name for n, v in found}})

    def _pair(self, definition: type[OpDef], op: Operator, result: Any, live: tuple[str, ...]) -> list[tuple[str, Variable]]:
        """(input name, gradient) for what a builder returned, in slot order, without what nobody wants."""
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
        """Drop what nobody reads of the operators from `start` on; return the results that may be renamed: nobody else refers to them."""
        read, made = set(results), set[str]()
        unread = shared = False
        for o in reversed(self.block.oplist[start:]):
            outs = o.output_arg_names
            unread = unread or not read.issuperset(outs)
            shared = shared or runs_bodies(o)  # whose blocks may read them
            made.update(outs)
            read.update(o.input_arg_names)
        if unread:
            self._drop_unused(start, set(results))
        return set() if shared else {n for n in results if n in made and n not in self.copies_made and results.count(n) == 1}

    def _drop_unused(self, start: int, used: set[str]) -> None:
        """Remove operators from `start` on whose results nobody reads, and optional outputs nobody reads."""
        program, oplist = self.block.program, self.block.oplist
        tail = oplist[start:]
        kept = flow.live_ops(program, used, partial(flow.acts, program), ops=tail)
        for n in set(flow.definitions(program, tail)).difference(flow.definitions(program, kept)):
            self._forget(n)
        # the other results of a second copy stay: a gradient further back may read them
        read = used.union(self.copies_made, flow.uses(program, kept))
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
        original = self.copies_made.pop(name, None)
        if original is not None:
            self.copies.pop(original, None)

    def _write_for(self, op: Operator | None) -> None:
        """Operators written from now on have the line and the device of `op`."""
        self.b.site, self.b.device = (op.site, op.device) if op is not None else (None, "")

    def _check_reads(self, start: int, i: int, op: Operator, in_place: set[str]) -> None:
        """Refuse a gradient that would read a forward value after it was overwritten."""
        if op.sub_blocks():
            in_place = set()  # a loop's own gradient knows which value of a variable it means
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
        """Finish the leaves whose last contribution came from operator `i`, so that they are ready as early as can be."""
        for n in op.input_arg_names:
            if n in self.leaves and self.first_use.get(n) == i:
                self._finish_leaf(n)

    def _finish_leaf(self, name: str) -> None:
        terms = self.terms.pop(name, None)
        if not terms:
            return
        self.final[name] = self._merge(name, terms, own_name=True, finishes=name in self.parameters)

    def _total(self, name: str, writer: Operator) -> Variable | None:
        """The gradient of a value that `writer` wrote, None when nothing flows into it."""
        terms = self.terms.pop(name, None)
        if terms is None:
            # a requested value that is computed from another: its finished gradient flows on, once
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

    def _merge(self, name: str, terms: list[_Term], own_name: bool, finishes: bool = False) -> Variable:
        """The sum of the contributions to the gradient of `name`; `finishes` says so on the operator that makes it."""
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

    def _rename(self, term: _Term, name: str, type_: TensorType, role_var: tuple[str, ...] = ()) -> None:
        """Give a contribution another name, and put `role_var` on the operator that makes it."""
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

    # -- recompute ----------------------------------------------------------------------------------------------------------------

    def _plan_recompute(self, checkpoints: Sequence[Variable | str] | str | None) -> None:
        self.copies: dict[str, str] = {}  # forward name -> name of its second copy
        self.copies_made: dict[str, str] = {}
        self.keep: set[str] = set()
        self.cuts: list[int] = []
        if checkpoints == "auto":
            self.keep, self.cuts = automatic(self.block, self.ops, self.live)
        elif checkpoints:
            names = _name_set(self.block, "checkpoints", checkpoints)
            for name in names:
                if name not in self.last_write:
                    raise wrong(f"append_backward: the checkpoint {name!r} is not computed by any operator")
            self.keep, self.cuts = at_variables(self.last_write, names)

    def value(self, name: str, reader: int) -> Variable:
        """The variable a gradient of operator `reader` reads: the forward one, or its second copy, computed here when needed."""
        if not self.cuts:
            return self.block.var(name)
        segment = bisect_left(self.cuts, reader)
        if segment == len(self.cuts) or not self._recomputable(name, segment):
            return self.block.var(name)
        waiting = [name]
        while waiting:
            n = waiting[-1]
            op = self.ops[self.last_write[n]]
            missing = [m for m in op.input_arg_names if m not in self.copies and self._recomputable(m, segment) and m not in waiting]
            if n in self.copies or not missing:
                waiting.pop()
                if n not in self.copies:
                    self._emit_again(op)
            else:
                waiting += missing
        return self.block.var(self.copies[name])

    def _recomputable(self, name: str, segment: int) -> bool:
        at = self.last_write.get(name, -1)
        if at < 0 or name in self.keep or bisect_left(self.cuts, at) != segment:
            return False
        op = self.ops[at]
        return OPS[op.type].effect not in _KEPT and not op.sub_blocks() and not self.block.desc(name).persistable

    def _emit_again(self, op: Operator) -> None:
        block = self.block
        out = {n: self._free_name(f"{n}@RECOMPUTE") for n in op.output_arg_names}
        ins = {s: tuple(self.copies.get(n, n) for n in names) for s, names in op.inputs.items()}
        outs = {s: tuple(out[n] for n in names) for s, names in op.outputs.items()}
        for n, copy in out.items():
            desc = block.desc(n)
            attrs: dict[str, Any] = {}
            if not desc.persistable:  # running statistics advance once; their second values are nobody's
                self.copies[n], self.copies_made[copy] = copy, n
                attrs["copy_of"] = n
            block.declare(desc.changed(name=copy, persistable=False, is_parameter=False, attrs=attrs))
        block.oplist.append(op.replace(inputs=ins, outputs=outs, role=Role.BACKWARD))


def _check_variable(owner: str, argument: str, value: Any) -> None:
    if not isinstance(value, Variable):
        raise wrong(f"{owner}: {argument} must be a Variable, got {type(value).__name__}: {value!r}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name_set(block: Block, argument: str, values: Iterable[Variable | str] | None) -> set[str]:
    """The names in a list of variables or names; each must be declared."""
    names = set()
    for v in (values,) if isinstance(values, (str, Variable)) else values or ():
        name = v.name if isinstance(v, Variable) else v
        if not isinstance(name, str):
            raise wrong(f"append_backward: {argument} takes variables or their names, got {type(v).__name__}: {v!r}")
        block.desc(name)
        names.add(name)
    return names


def _parameter(block: Block, value: Variable | str) -> Parameter:
    name = value.name if isinstance(value, Variable) else value
    if not isinstance(name, str):
        raise wrong(f"append_backward: parameter_list takes parameters or their names, got {type(value).__name__}: {value!r}")
    var = block.var(name)
    if not isinstance(var, Parameter):
        raise wrong(
            f"append_backward: {name!r} is in parameter_list, but it is not a parameter; gradients(loss, [{name}]) takes any variable"
        )
    if var.stop_gradient:
        raise wrong(f"append_backward: {name!r} is in parameter_list, but it is not trainable (its stop_gradient is set)")
    return var
