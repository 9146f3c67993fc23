"""Propagation: one walk over all operators of all roles gives every value a placement, by the ops' own placement rules alone.

If a reader needs another placement than a value has, a `redistribute` is inserted: its result is the same global value in that placement.
Later readers use the copy until the name is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property

from ...ir.errors import TranspileError
from ...ir.flow import sub_reads, sub_writes
from ...ir.forms import Held, State
from ...ir.make_op import filled
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Frozen, Operator, unary
from ...ir.parts import entry_of
from ...ir.program import Block, Program
from ...ir.types import REPLICATE, At, Placement, show_placement
from ...ir.unique_name import unused
from ...ir.var import Var
from .choose_row import may_write, move_cost, nominal_bytes
from .decompose import not_again, written_out
from .loop_sums import begun, only_added_to
from .moves import Move, Route, every_move, suffix
from .placement_walk import PlacementWalk, elsewhere, where


class Propagation(PlacementWalk):
    """Places the operators of one program, in place. `rest` has the storage placements of persistables and data; variables in `floating`
    are stored where the first operator that touches them needs them. `update` gives the placement of a parameter's final gradient.
    `allowed` may refuse a move. See PlacementWalk for the other arguments.
    """

    def __init__(
        self,
        program: Program,
        axes: Mapping[str, int],
        rest: Mapping[str, Placement],
        floating: set[str],
        update: Callable[[str], Placement | None],
        stays: Container[str] = (),
        allowed: Callable[[Move, Operator], None] = every_move,
        pins: Mapping[str, At] | None = None,
    ):
        super().__init__(program, axes, stays, pins or {})
        self.floating, self.update, self.allowed = floating, update, allowed
        self.moves: list[Move] = []
        self.turns = program.turns
        self.routes: dict[tuple[Held, int], Route] = {}  # by the Held and the id of a placement; the route keeps the placement alive
        self.reasons: dict[str, Frozen] = {}  # the attributes of redistributes
        self.keep: set[str] = set()
        for block in program.blocks:
            for name, (_, t, _, persistable, _, is_data, *_) in block.descs.items():
                self.types[name] = t
                number = self.by_id.get(id(t))
                self.type_of[name] = self._number(t, t) if number is None else number
                if persistable or is_data:
                    if persistable:
                        self.keep.add(name)
                    if name in floating:
                        self.at[name] = self._held(name, ())
                    else:
                        self.home[name] = place = rest.get(name, REPLICATE)
                        self.at[name] = self._held(name, (place,))
        self.finished: set[str] = set()
        self.parts_of: dict[str, list[Operator]] = {}  # decomposed operators, by the first name that they write
        self.source = self.block.oplist

    def _begin_block(self, block: Block) -> None:
        """Do nothing: the storage placements are known from the start."""

    def _end_block(self, block: Block) -> None:
        """Do nothing: placements are declared after the walk over all blocks."""

    def declared(self, d: Var, form: Placement) -> Var:
        old = d.placement
        return d if form is old or form == old else Var(d.name, d.type, form, *d[3:])

    def copy(self, d: Var, form: Placement) -> Var:
        return Var(d.name, d.type, form, stop_gradient=True)

    def run(self) -> None:
        super().run()
        home = self.home
        for block in self.program.blocks:
            descs = block.descs
            for name, d in descs.items():
                old = d.placement
                q = home.get(name, old)
                if q is not old and q != old:
                    descs[name] = self.declared(d, q)

    @cached_property
    def last(self) -> dict[str, Operator]:
        """The last operator of block 0 that writes each persistable."""
        return {n: op for op in self.source for n in op.output_arg_names if n in self.keep}

    def _parts(self, op: Operator) -> list[Operator] | None:
        """The operators that replace one operator, with their new values declared; None if it is not decomposed."""
        parts = written_out(self.block, op)
        if parts is None:
            return None
        out = self.block.desc(op.output_arg_names[0])
        self.parts_of[out.name] = parts
        parts = not_again(self.block, op, parts, self.parts_of.get(out.attrs.get("copy_of", ""), ()), self.at)
        for part in parts:
            self.last.update((n, part) for n in part.output_arg_names if self.last.get(n) is op)
            for n in part.output_arg_names:
                if n not in self.types:
                    self.types[n] = t = self.block.descs[n].type
                    self.type_of[n] = self._number(t, t)
        return parts

    # -- moves ----------------------------------------------------------------------------------------------------------------

    def bring(self, name: str, form: Placement, op: Operator, why: str = "") -> str:
        """The name under which a value has a placement, after a redistribute if needed."""
        held = self.at[name]
        if not held.forms:  # a floating variable is stored where its first operator needs it, and never cut over time axes
            rests = tuple([e for e in form if e.group not in self.turns]) if self.turns and name in self.keep else form
            self.home[name] = rests
            held = self._held(name, (rests,))
            self.hold(name, held)
            if rests == form:
                return name
        route = self._route(name, held, form)
        if route.here:
            return self.local(name, route.nearest)
        target = self._move(name, held, route, op, why)
        if name not in self.finished:  # a final gradient keeps the placement of its update
            self.hold(name, self._also(name, held, route), *(self.names.get(name) or (name,)), target)
        return target

    def _move(self, name: str, held: Held, route: Route, op: Operator, reason: str) -> str:
        """Write a redistribute; returns the name of the copy."""
        if any(e.is_own and e not in route.place for e in held.forms[route.nearest]):
            raise TranspileError(
                f"op {op.type} needs one global value of %{name}, but each rank has its own; use layers.replica_mean before it{where(op)}"
            )
        move = Move(name, held.forms[route.nearest], route.place, self.types[name], reason)
        self.allowed(move, op)
        self.moves.append(move)
        target = self.new(name, route.place, route.ending)
        self._redistribute(self.local(name, route.nearest), target, op, reason)
        return target

    def _route(self, name: str, held: Held, place: Placement) -> Route:
        key = held, id(place)
        route = self.routes.get(key)
        if route is None:
            number, entries, _ = self.general.of(place)
            alike = held, -1 - number  # no form of `held` has a root or flat ranges: the route is the same for all of them
            known = self.routes.get(alike) if entries else None
            if known is not None:
                route = self.routes[key] = Route(known.here, known.nearest, known.ending, place)
                return route
            route = self.routes[key] = self._found_route(name, held, place)
            if entries and not any(self.general.of(q)[1] for q in held.forms):
                self.routes[alike] = route
        return route

    def _found_route(self, name: str, held: Held, place: Placement) -> Route:
        here = place in held.forms
        nearest = held.forms.index(place) if here else 0
        if len(held.forms) > 1 and not here:
            size = nominal_bytes(self.types[name])
            costs = [sum(move_cost(entry_of(q, g), entry_of(place, g), size) for g, _ in self.groups) for q in held.forms]
            nearest = costs.index(min(costs))
        return Route(here, nearest, suffix(held.forms[nearest], place), place)

    def _also(self, name: str, held: Held, route: Route) -> Held:
        if route.also is None:
            route.also = held if route.here else self._held(name, (*held.forms, route.place))
        return route.also

    def also(self, name: str, held: Held, form: Placement) -> Held:
        return self._also(name, held, self._route(name, held, form))

    def new(self, name: str, form: Placement, ending: str) -> str:
        """Declare a copy of a value, or its new value, in another placement."""
        target = unused(f"{name}.{ending}", self.types)
        self.types[target] = t = self.types[name]
        self.type_of[target] = self.type_of[name]
        self.block.descs[target] = Var(target, t, form, stop_gradient=True)
        return target

    def _new_result(self, name: str, form: Placement) -> str:
        return self.new(name, form, "new")

    def _redistribute(self, source: str, target: str, near: Operator, reason: str) -> None:
        attrs = self.reasons.get(reason)
        if attrs is None:
            attrs = self.reasons[reason] = filled("redistribute", {"reason": reason})
        self.out.append(unary("redistribute", source, target, attrs, near.site))

    def returns(self, name: str, op: Operator) -> bool:
        """Whether a result is moved to its storage placement; it is not if a later operator overwrites it."""
        return name not in self.keep or bool(self.block.idx) or self.last[name] is op

    def convert(self, name: str, source: str, target: str, want: Placement, near: Operator) -> None:
        self._go(name, source, self.at[name].forms[0], near)

    def _go_home(self, name: str, new: str, made: Held, op: Operator) -> None:
        self.hold(name, self.also(name, made, self.home[name]), new, name)
        self._go(name, new, made.forms[0], op)

    def _go(self, name: str, new: str, place: Placement, op: Operator) -> None:
        """Move the new value of a variable, which has its own name and the placement `place`, to the storage placement of the variable."""
        move = Move(name, place, self.home[name], self.types[name], "its storage placement")
        self.moves.append(move)
        self._redistribute(new, name, op, move.reason)

    def _finish(self, finished: tuple[str, ...], op: Operator) -> None:
        """Move final gradients to the placement of their update; later readers use only that copy. `finished` is [param, grad, ...]."""
        for param, grad in zip(finished[::2], finished[1::2], strict=True):
            q = self.update(param)
            held = self.at.get(grad)
            if q is None or held is None:
                continue
            route = self._route(grad, held, q)
            if not route.here:
                if route.alone is None:
                    route.alone = self._held(grad, (route.place,))
                self.hold(grad, route.alone, self._move(grad, held, route, op, "update"))
                self.finished.add(grad)

    # -- operators that run blocks ----------------------------------------------------------------------------------------------

    def _ahead(self, op: Operator, definition: type[OpDef], blocks: Sequence[Block]) -> Mapping[str, str]:
        """Replicate the condition of an operator that runs blocks; if a root runs it, move the operands to the root."""
        pin, changed = self.pins.get(op.device), {}
        for decides in definition.control_operands(op):
            # the root that runs a loop decides alone
            if not (definition.control.repeats and pin is not None and (pin,) in self.at[decides].forms):
                changed[decides] = self.bring(decides, REPLICATE, op, f"{op.type}: what decides is the same on every rank")
        if pin is not None:
            changed |= self._brought_to(pin, dict.fromkeys(n for block in blocks for n in sub_reads(self.program, block)), op)
        return changed

    def _carry(self, op: Operator, definition: type[OpDef], blocks: Sequence[Block]) -> dict[str, tuple[int, Placement]]:
        """Before blocks run, move the variables that they write to their storage placements. A variable that a loop only adds to takes the
        placement that the loop needs. Returns these variables, with the number of the operator that wrote each, and its placement there."""
        added: dict[str, tuple[int, Placement]] = {}
        for n in dict.fromkeys(n for block in blocks for n in sub_writes(self.program, block) if n in self.at):
            held, loop = self.at[n], definition.control.repeats
            adds = loop and n not in self.keep and only_added_to(self.program, blocks[0], n, self._kind)
            if adds and held.forms and (k := begun(self.program, self.out, n)) is not None:
                added[n] = k, self.home.pop(n)
                self.floating.add(n)
                self.hold(n, held := self._held(n, ()))
            if not held.forms:
                if not definition.control.repeats or adds:
                    continue  # the first operator of the block that uses it decides its storage placement
                self.bring(n, REPLICATE, op, "")
            home = self.home.get(n, REPLICATE)
            if definition.control.repeats and not adds and any(e.op for e in home):
                self._reduce_ahead(n, op)
                continue
            if home not in held.forms:  # the block reads it in its storage placement
                self._go(n, self.local(n, 0), held.forms[0], op)
            self.hold(n, self._held(n, (home,)))
        return added

    def _reduce_ahead(self, name: str, op: Operator) -> None:
        """Reduce a variable before a loop that writes it, so that the loop carries it replicated. The operators so far use the partial
        value under a new name."""
        partial, held = self.home[name], self.at[name]
        if name in self.keep or name not in self.block.descs or any(name in self._in_bodies(one) for one in self.out):
            raise TranspileError(
                f"op {op.type} writes %{name} in a sub-block, which is stored {show_placement(partial)}; replicate it before{where(op)}"
            )
        new = self._new_result(name, partial)
        self.out[:] = [one.renamed({name: new}, outputs=True) for one in self.out]
        self.hold(name, held, *[new if n == name else n for n in self.names.get(name) or (name,)])
        whole = tuple([e for e in partial if not e.op])
        k = held.forms.index(whole) if whole in held.forms else 0
        move = Move(name, held.forms[k], whole, self.types[name], f"{op.type}: the loop writes it")
        self.allowed(move, op)
        self.moves.append(move)
        self._redistribute(self.local(name, k), name, op, move.reason)
        self.home[name] = whole
        self.hold(name, self._held(name, (whole,)))

    def _in_bodies(self, op: Operator) -> set[str]:
        """The variables of enclosing blocks that the blocks of an operator use."""
        blocks = [self.program.blocks[idx] for idx in op.sub_blocks()]
        return {n for block in blocks for n in (*op.input_arg_names, *sub_writes(self.program, block))}

    def _begin(self, name: str, k: int, before: Placement) -> None:
        """Move the result of operator k, which had the placement `before`, to the placement that the loop after it needs."""
        op, place = self.out[k], self.home[name]
        if place == before:
            return
        definition = opdef(op.type)
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        places = [None if n is None else self.home.get(n, REPLICATE) for n in outs]
        kind = self._kind(op, definition, ins, outs)
        reads = any(n is not None and j not in kind.pattern.shape_only for j, n in enumerate(ins))
        if not reads and may_write(kind, places, self.groups):
            del self.out[k]  # it reads no elements of its operands, so it can run right before the loop
            away = [n for n in op.input_arg_names if n in self.at and elsewhere(self.home.get(n, REPLICATE), place)]
            self.out.append(op.renamed({n: self.bring(n, REPLICATE, op, f"{op.type}: its shape") for n in away}))
            return
        new = self._new_result(name, before)
        self.out[k] = op.with_slots(op.inputs, {s: tuple([new if n == name else n for n in names]) for s, names in op.outputs.items()})
        self._go(name, new, before, op)
        self.out.insert(k + 1, self.out.pop())

    def _brought_to(self, pin: At, names: Iterable[str], op: Operator) -> dict[str, str]:
        """Before a block runs at a root, move the values that it reads to that root: other ranks do not run the block, so they send before
        it."""
        brought = {}
        for n in names:
            held = self.at.get(n)
            away = [q for q in held.forms if any(e.root is not None and e.group == pin.group and e != pin for e in q)] if held else []
            if held is not None and away and len(away) == len(held.forms):
                place = tuple(pin if e.group == pin.group else e for e in away[0])
                brought[n] = self.bring(n, place, op, f"{op.type}: at a root")
        return brought

    def _enter(self, state: State) -> None:
        super()._enter(state)
        self._rest_floating((self.at, self.names))

    def _settle(self, op: Operator, outer: State, ends: Sequence[State], carried: dict[str, tuple[int, Placement]]) -> None:
        for state in (outer, *ends):
            self._rest_floating(state)
        self.floating.difference_update(carried)
        for n, (k, before) in sorted(carried.items(), key=lambda item: -item[1][0]):  # from the last one: later numbers change
            self._begin(n, k, before)

    def _rest_floating(self, state: State) -> None:
        """Give floating variables in `state` the storage placement that another block has chosen."""
        for n in self.floating:
            if n in self.home and not state[0][n].forms:
                state[0][n] = self._held(n, (self.home[n],))

    def _replaced(self, op: Operator, moved: Operator) -> None:
        self.last.update((n, moved) for n in op.output_arg_names if self.last.get(n) is op)

    def common(self, op: Operator, out: str, held: Sequence[tuple[str, Held]]) -> Held:
        """The cheapest placement that all branches can give a result."""
        groups = [g for g, _ in self.groups]

        def cost(q: Placement) -> float:
            return sum(
                min(sum(move_cost(entry_of(o, g), entry_of(q, g), nominal_bytes(self.types[n])) for g in groups) for o in h.forms)
                for n, h in held
            )

        return self._held(out, (min((q for _, h in held for q in h.forms), key=cost),))
