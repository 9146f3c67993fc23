"""Place: give every value of main and startup a placement, and insert a redistribute where a reader needs another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir import flow
from ...ir.errors import TranspileError, nearest
from ...ir.form_walk import FormWalk
from ...ir.forms import FormChoice, Held, Names
from ...ir.make_op import filled
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator, Role, unary
from ...ir.parts import check_placement, entry_of
from ...ir.pass_base import Job, Pass
from ...ir.program import Program, ProgramPair
from ...ir.types import ANY, REPLICATE, At, Entry, Own, Placement, Shard, show_placement
from ...ir.var import Var
from ..cluster import DATA, SERVERS, axes_with_ranks
from ..placement.choose_row import PatternClasses, may_write
from ..placement.gathered_parameters import GatherForUse, Use
from ..placement.moves import Move, every_move
from ..placement.parameter_homes import EVERYWHERE, Reshard, matching_scopes
from ..placement.pipeline_stages import between_stages, pins, rest_at_stages
from ..placement.placement_walk import no_axis, where
from ..placement.propagate import Propagation


@dataclass(frozen=True)
class Place(Pass):
    """Cut the batch over `group` and place all other values by the ops' placement rules; choices place the parameters (see
    parameter_homes.py).

    `rest` gives the storage placement of parameters between steps. In forward and backward they have their annotated placement: a parameter
    that is stored in another one is gathered before its first reader in each of the two. `reshard` says which of the gathered ones are
    freed after forward: all but the last unit, none, so many first units, or the units with parameters of these scopes (parameter_homes:
    staying). `update` says where parameters are updated; None: in the storage placement.

    `strict` refuses every redistribute that sends data and that the strategy itself does not ask for. Allowed are those of parameters that
    are gathered for use, of final gradients, between stages, of single numbers, and back to the storage placement. `loss` names the loss,
    if it must be checked.
    `own`: each rank trains separately on its rows; all values are replica-local, except the results of operators that combine replicas (`R`
    in their pattern).
    """

    update: Any = None
    rest: Any = EVERYWHERE
    reshard: Reshard = True
    group: str = DATA
    strict: bool = False
    loss: str = ""
    own: bool = False

    requires = ("grouped",)
    ensures = ("placed",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        walk, startup = self._placed(pair.main.copy(), job, {}), pair.startup.copy()
        if folded := _folded(walk):
            walk = self._placed(pair.main.copy(), job, folded)
        job.log += walk.moves
        descs = walk.program.global_block().descs
        place_startup(startup, {n: walk.home[n] for n in walk.keep if n in descs and n in walk.home}, job)
        return ProgramPair(walk.program, startup)

    def _placed(self, main: Program, job: Job, given: Mapping[str, Placement]) -> Propagation:
        """The propagation that placed the values of main; `given` are the placements of some data."""
        block = main.global_block()
        check_loss(main, self.loss)
        axes = job.axes(main)
        pinned = pins(main, job.mesh.axes)
        rest = {**self._rest(main, job), **given}
        floating = self._floating(main).difference(rest)
        stays = {d.name for d in block.descs.values() if d.persistable and d.placement}
        for n, at in rest_at_stages(main, pinned, floating).items() if pinned else ():
            rest[n] = _ordered((at, *rest.get(n, ())), axes)
            block.descs[n] = block.descs[n].changed(placement=_ordered((at, *block.descs[n].placement), axes))
        descs = block.descs
        finished = [] if self.own else [p for b in main.blocks for op in b.oplist if op.role_var for p in op.role_var[::2]]
        trained = {p: descs[p] for p in finished if p in descs}
        params = {} if self.own else {d.name: d for d in descs.values() if d.is_parameter and not _rooted(rest.get(d.name))} | trained
        resting = self.rest.seen(main) if hasattr(self.rest, "seen") else self.rest
        at_rest = self._places(resting, params, rest, main, job)
        update = at_rest if self.update is None else self._places(self.update, trained, rest, main, job)
        in_use = self._in_use(at_rest, rest)
        walk: Propagation
        allowed = self._refuse if self.strict else every_move
        of_walk = main, axes, {**rest, **at_rest}, floating, update.get, stays, allowed, pinned
        if in_use:
            matching = matching_scopes(main, in_use, self.reshard) if isinstance(self.reshard, tuple) else ()
            walk = GatherForUse(*of_walk, use=Use(in_use, _units(resting, params), self.reshard, matching))
        else:
            walk = Propagation(*of_walk)
        walk.run()
        return walk

    def _rest(self, main: Program, job: Job) -> dict[str, Placement]:
        """The storage placements of data and parameters: data with an open axis 0 are sharded, parameters have their annotation, all others
        are replicated."""
        descs = main.global_block().descs
        data = [d for d in descs.values() if d.is_data]
        open_ = [d for d in data if d.type.shape[:1] == (ANY,)]
        if data and not open_:
            listed = ", ".join(f"{d.name!r} {d.type}" for d in data[:5])
            raise TranspileError(
                f"{main.label()} has no input with an open batch axis to split among the ranks: {listed}; "
                "declare it with -1 or a name as axis 0"
            )
        cut = self.group in axes_with_ranks(job.mesh.axes)
        dealt: Entry = Own(self.group) if self.own else Shard(0, self.group)
        parts = [*([dealt] if cut else ()), *(Shard(0, axis) for axis in main.turns)]
        rest: dict[str, Placement] = {d.name: tuple(parts) for d in open_}
        if cut and self.own:
            rest |= dict.fromkeys(owned(main, rest), (dealt,))
        if SERVERS in job.mesh.axes:  # servers compute nothing from data: other state that forward computes belongs to a trainer
            found = owned(main, rest).difference(op_outputs(main, Role.OPTIMIZE))
            if found and job.mesh.axes[self.group] == 1:
                raise TranspileError(
                    f"{main.label()} keeps {', '.join(sorted(found)[:3])}, which forward computes from data, and a single trainer "
                    "with servers has no other trainer to share it with; train on two or more, or on one device without servers"
                )
            rest |= dict.fromkeys(found, (At(0, self.group),))
        for d in descs.values():
            if d.placement:
                _check_annotation(d, job)
                if cut and self.own and entry_of(d.placement, self.group) is not None:
                    self._refuse_cut(d, main)
                own = (dealt,) if self.own and dealt in rest.get(d.name, ()) else ()
                rest[d.name] = _ordered((*own, *d.placement), job.mesh.axes)
        return rest

    def _refuse_cut(self, d: Var, main: Program) -> None:
        """Raise TranspileError for a value that is annotated over the group whose ranks train separately."""
        reader = next((op for op in main.ops if d.name in op.input_arg_names), None)
        raise TranspileError(
            f"{d.name!r} is annotated {show_placement(d.placement)}, but here each rank of {self.group} has its own copy; remove the "
            f"placement, or shard it over another axis, with trainers=fx.Mesh({self.group}=2, tp=2)" + (where(reader) if reader else "")
        )

    def _places(
        self, choice: Any, params: Mapping[str, Var], annotated: Mapping[str, Placement], main: Program, job: Job
    ) -> dict[str, Placement]:
        """The placements of parameters by a choice: their annotation, and the choice's entry over the group."""
        if not hasattr(choice, "entries"):
            wanted = "a choice has a method entries(params, group, ranks)"
            raise TranspileError(f"{wanted}, {choice!r} has none; see transpiler/placement/parameter_homes.py")
        group = getattr(choice, "group", self.group)
        ranks = job.mesh.axes.get(group, 1)
        free = {n: d for n, d in params.items() if entry_of(d.placement, group) is None}  # annotated parameters keep their entry
        entries = choice.entries(free, group, ranks) if ranks > 1 else {}
        _check_named(choice, entries, free, params)
        axes = job.axes(main)
        one: dict[Placement, Placement] = {}  # equal placements become one object: the walk compares them by identity
        known: dict[tuple, Placement] = {}
        places = {}
        for n, d in params.items():
            base, e = annotated.get(n, REPLICATE), entries.get(n)
            key = base, e, id(d.type)
            if key not in known:
                q = base if e is None else _ordered((*base, e), axes)
                what = check_placement(d.type, q, main.groups, job.mesh.world_size) if q else ""
                if what or any(e.op or e.is_local for e in q):
                    what = what or f"{show_placement(q)}; a parameter is replicated, sharded, in pieces or at a root"
                    raise TranspileError(f"{choice!r} cannot have {n!r} there: {what}")
                known[key] = one.setdefault(q, q)
            places[n] = known[key]
        return places

    def _in_use(self, at_rest: Mapping[str, Placement], annotated: Mapping[str, Placement]) -> dict[str, Placement]:
        """The annotated placements of parameters that are stored in another placement."""
        in_use = {n: annotated.get(n, REPLICATE) for n, q in at_rest.items() if q != annotated.get(n, REPLICATE)}
        rooted = next((n for n in in_use if any(e.root is not None and e not in annotated.get(n, ()) for e in at_rest[n])), None)
        if rooted is not None and self.reshard is not False:  # operators on other ranks could not read its shape
            raise TranspileError(
                f"{self.rest!r} has {rooted!r} stored {show_placement(at_rest[rooted])}; all ranks must hold a "
                "part: shard it"
            )
        return in_use

    @staticmethod
    def _floating(main: Program) -> set[str]:
        """State that only updates touch: it is stored where the updates need it."""
        block = main.global_block()
        state = [d for d in block.descs.values() if d.persistable and not d.is_parameter and not d.placement]
        named = {d.name for d in state if d.type.numel != 1 or _of_one_type(d, block.descs.get(d.attrs.get("state_of", "")))}
        for b in main.blocks if named else ():
            for op in b.oplist:
                if op.role is not Role.OPTIMIZE:
                    named.difference_update(op.input_arg_names, op.output_arg_names)
        return named

    def _refuse(self, move: Move, op: Operator) -> None:
        number = move.type.numel == 1  # a single number has no axis to shard
        asked = number or move.reason in ("update", "use") or between_stages(move.old, move.new)
        asked = asked or opdef(op.type).comm.annotation is not None
        if move.sends and not asked:
            raise TranspileError(
                f"strict: a redistribute would be needed: {move}; annotate the operands so that they agree, or leave strict off{where(op)}"
            )


def _check_named(choice: Any, entries: Any, free: Mapping[str, Var], params: Mapping[str, Var]) -> None:
    """Raise TranspileError if a choice returns something else than entries for the parameters that it was given."""
    if not isinstance(entries, Mapping):
        raise TranspileError(f"{choice!r}.entries must return {{name of a parameter: placement, or None for everywhere}}, got {entries!r}")
    for n in entries:
        if n in params and n not in free:
            placed = show_placement(params[n].placement)
            raise TranspileError(f"{choice!r} places parameter {n!r}, which is annotated {placed}; leave the annotation or the choice out")
        if n not in params:
            raise TranspileError(f"{choice!r} places {n!r}, and there is no such parameter; {nearest(str(n), list(params), 'there are')}")


def _folded(walk: Propagation) -> dict[str, Placement]:
    """Data that all readers need sharded in larger blocks than rows, such as token labels beside sequences of tokens."""
    descs = walk.program.global_block().descs
    wanted: dict[str, set[Placement]] = {}
    for m in walk.moves:
        if m.name in descs and descs[m.name].is_data:
            wanted.setdefault(m.name, set()).add(m.new)
    found = {}
    for name, places in wanted.items():
        (place, *others), old = places, descs[name].placement
        if not others and len(place) == len(old) and all(_larger_blocks(a, b) for a, b in zip(old, place, strict=True)):
            if not any(name in op.input_arg_names and not opdef(op.type).control.abstract for b in walk.program.blocks for op in b.oplist):
                found[name] = place
    return found


def _larger_blocks(old: Entry, new: Entry) -> bool:
    return old.axis is not None and (old.axis, old.group) == (new.axis, new.group) and new.unit % old.unit == 0


def owned(main: Program, data: Iterable[str]) -> set[str]:
    """The persistables that are replica-local if these data are: those computed from the data without communication."""
    own, before = set(data), -1
    while len(own) > before:  # the next step reads the state that one step writes
        before = len(own)
        for block in main.blocks:
            for op in block.oplist:
                reads, writes = flow.touches(main, op)
                if not own.isdisjoint(reads) and opdef(op.type).comm.replica_collective is None:
                    own.update(writes)
    descs = main.global_block().descs
    return {n for n in own if n in descs and descs[n].persistable}


def _rooted(place: Placement | None) -> bool:
    return place is not None and any(e.root is not None for e in place)


def op_outputs(main: Program, role: Role) -> set[str]:
    """The names that operators of a role write."""
    return {n for b in main.blocks for op in b.oplist if op.role is role for n in op.output_arg_names}


def _of_one_type(state: Var, param: Var | None) -> bool:
    """Does a one-element state belong to a one-element parameter? Other one-element states are numbers that all updates read."""
    return param is not None and state.type.shape == param.type.shape


def _units(choice: Any, params: Mapping[str, Var]) -> dict[str, Sequence[str]]:
    """For each parameter, the unit that is gathered together with it, by the choice; empty if the choice has no `units`."""
    units = choice.units(params) if hasattr(choice, "units") else ()
    return {n: unit for unit in map(tuple, units) for n in unit}


def check_loss(main: Program, loss: str) -> None:
    """Raise TranspileError if the program has no gradients, or not the loss that the caller names."""
    ops = main.global_block().oplist
    roles = {op.role for op in ops}
    named = [n for op in ops if op.role is Role.LOSS for n in op.output_arg_names] if loss else []
    backward = Role.BACKWARD in roles
    if loss and loss not in named:
        if not backward:
            raise TranspileError(
                f"{main.label()} has no gradients, so {loss!r} is not its loss; call optimizer.minimize(loss) before transpile"
            )
        raise TranspileError(f"{main.label()} has no loss {loss!r}; {nearest(loss, named, 'its loss is')}")
    if Role.OPTIMIZE in roles and not backward:
        raise TranspileError(f"{main.label()} has optimizer operators but no gradients; build it with optimizer.minimize(loss)")


def _check_annotation(d: Var, job: Job) -> None:
    for e in d.placement:
        if e.group not in job.mesh.axes:
            what = no_axis(e.group, job.mesh.axes, job.mesh.groups())
            raise TranspileError(f"{d.name!r} is annotated {show_placement(d.placement)}, but {what}")
    if what := check_placement(d.type, d.placement, job.mesh.groups(), job.mesh.world_size):
        raise TranspileError(f"{d.name!r} {d.type} is annotated {show_placement(d.placement)}: {what}")


def _ordered(placement: Placement, axes: Mapping[str, int]) -> Placement:
    """The entries in the order of the axes, outer before inner, without entries over axes of one rank."""
    if len(placement) == 1 and axes.get(placement[0].group, 1) > 1:
        return placement
    order, kept = list(axes), axes_with_ranks(axes)
    known = [e for e in placement if e.group in kept or e.group not in order]  # a group that is not an axis is refused later, with its name
    return tuple(sorted(known, key=lambda e: order.index(e.group) if e.group in order else len(order)))


# -- startup --------------------------------------------------------------------------------------------------------------------


def place_startup(startup: Program, rest: Mapping[str, Placement], job: Job) -> None:
    """Place the startup program. Operators without inputs write their results in the final placement if a rule allows it; else they write
    the replicated value, which is then sharded."""
    block = startup.global_block()
    for n, d in list(block.descs.items()):
        if n in rest and rest[n] != d.placement:
            block.descs[n] = d.changed(placement=rest[n])
    StartupPlacement(startup, job).run()


class StartupPlacement(FormWalk):
    """The walk that places a startup program: variables are stored in their declared placements, and all operators with inputs compute
    replicated values."""

    def __init__(self, startup: Program, job: Job):
        super().__init__(startup)
        self.log, self.kinds = job.log, PatternClasses()
        self.axes = [(group, len(sets[0])) for group, sets in startup.groups.items()]

    def stored(self, d: Var) -> Placement:
        return d.placement

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        if not any(map(self.home.get, op.output_arg_names)) and not any(map(self.home.get, op.input_arg_names)):
            return None
        rests = [REPLICATE if n is None else self.block.desc(n).placement for n in outs]
        if not op.input_arg_names:
            types = [None if n is None else self.block.desc(n).type for n in outs]
            if may_write(self.kinds.of(definition, [], types, op.attrs), rests, self.axes):
                return FormChoice.of([], [Held((place,)) for place in rests])
        return FormChoice.of([None if n is None else REPLICATE for n in ins], [Held((REPLICATE,))] * len(outs))

    def convert(self, name: str, source: str, target: str, want: Placement, near: Operator) -> None:
        self.out.append(unary("redistribute", source, target, filled("redistribute", {"reason": "startup"}), near.site))
        if target != name:
            self.log.append(f"%{name}: {show_placement(self.home[name])} to {show_placement(want)}, for {near.type} of startup")

    def declared(self, d: Var, form: Placement) -> Var:
        return d

    def copy(self, d: Var, form: Placement) -> Var:
        return Var(d.name, d.type, form, stop_gradient=True)

    def ending(self, form: Placement) -> str:
        return "full"

    def _new_result(self, name: str, form: Placement) -> str:
        return self.new(name, form, "whole")


__all__ = ["Place", "check_loss", "place_startup", "where"]
