"""Write a collective over all ranks as the stages of a sequence: on the full value, or slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.make_op import filled, make_op
from ...ir.opdef import opdef
from ...ir.operator import Operator, unary
from ...ir.parts import coords_of, local_type
from ...ir.pass_base import Job
from ...ir.program_rewriter import Writer
from ...ir.types import At, Entry, Partial, TensorType
from ...ir.unique_name import unused
from ...ir.var import Var
from ...view.diff import show_bytes
from ..algorithms.selection import AlgorithmTable
from ..algorithms.sequence import CollectiveSequence, Grid, SequenceStage, Slicing, on_groups
from ..algorithms.symbolic_check import slicing_of
from ..cluster import DATA, NODE, RAIL
from .choose_algorithm import BETWEEN_HOSTS, named, with_algorithm, without_algorithm
from .slices import slices, steps
from .write_algorithm import carried_by, others, why_no_algorithm

Entries = dict[str, Entry]  # the entries of a value by group


@dataclass
class _InFlight:
    """Elements [start, stop) of the flat operand of a collective, on their way through the stages. `x` is their current variable; new
    variables are named after `name`."""

    op: Operator
    name: str
    x: str
    entries: Entries
    start: int = 0
    stop: int = 0


class SequenceWriter:
    """Writes collectives that a sequence carries out. `between`: the algorithm for stages between hosts without their own."""

    def __init__(self, recipe: CollectiveSequence, writer: Writer, job: Job, between: str | AlgorithmTable):
        self.recipe, self.writer, self.block, self.job, self.between = recipe, writer, writer.block, job, between
        self.hosts = job.mesh.hosts
        self.devices = job.mesh.world_size // self.hosts
        self.coords = coords_of(writer.program.groups, 0, writer.program.turns)
        self.known: dict[tuple, tuple[str, str]] = {}  # algorithms between hosts, which no root decides, and what is said of them

    def write(self, ops: Sequence[Operator]) -> None:
        """Write neighbouring collectives. Raises Refused for one that the recipe cannot carry out."""
        slicing = slicing_of(self.recipe, self.hosts)
        if slicing is not None:
            self._sliced(ops, slicing)
            return
        for op in ops:
            out = op.output_arg_names[0]
            value = _InFlight(op, out, op.input_arg_names[0], self._entries(op))
            shape = self.block.desc(out).type.shape
            stages = self._stages(op, shape[0] if shape else 0)
            for k, stage in enumerate(stages):
                made = out if k == len(stages) - 1 else unused(f"{out}.{_word(stage, k)}", self.block.descs, "1".__mul__)
                self._stage(value, stage, made, {})

    def _stages(self, op: Operator, rows: int) -> tuple[SequenceStage, ...]:
        grid = Grid(self.hosts, self.devices, op.attrs.get("root", 0), rows)
        return on_groups(self.recipe.stages(op.type, grid), grid)

    def _entries(self, op: Operator) -> Entries:
        """The entries of the operand over the groups of the stages. A replicated value may be broadcast too."""
        groups = (NODE, RAIL) if self.devices > 1 else (DATA,)
        if op.type == "all_gather":
            return {}
        if op.type != "broadcast":
            return {g: Partial(op.attrs["op"], g) for g in groups}
        if self.devices == 1:
            return {DATA: At(op.attrs["root"], DATA)}
        host, local = divmod(op.attrs["root"], self.devices)
        return {RAIL: At(host, RAIL), NODE: At(local, NODE)}

    # -- stages -------------------------------------------------------------------------------------------------------------

    def _stage(self, value: _InFlight, stage: SequenceStage, out: str, attrs: dict[str, Any]) -> None:
        """Write a stage that makes `out` from the current variable of a value; declare `out` if needed."""
        op, definition = value.op, opdef(stage.collective)
        if stage.group == DATA and stage.collective == op.type:
            attrs = {**op.attrs, **attrs}
        attrs = {**attrs, "group": stage.group}
        if "op" in definition.attrs:
            attrs["op"] = op.attrs["op"]
        if "root" in definition.attrs:
            attrs["root"] = stage.root
        full = filled(stage.collective, attrs)
        old = value.entries.pop(stage.group, None)
        if out not in self.block.descs:
            assert definition.comm.move is not None
            new = definition.comm.move(old, **full)
            if new is not None:
                value.entries[stage.group] = new
            self.block.declare(Var(out, self.block.desc(value.x).type, tuple(value.entries.values()), stop_gradient=True))
        self.writer.keep(self._carried(unary(stage.collective, value.x, out, full, op.site), stage))
        value.x = out

    def _carried(self, op: Operator, stage: SequenceStage) -> Operator:
        """The operator of a stage, with its algorithm."""
        inside, two_levels, _ = stage.algorithm.partition("/")
        if stage.group == NODE or inside and not two_levels:
            return op if not inside else carried_by(op, inside, self.devices if stage.group == NODE else self._ranks(stage))
        block = self.block
        if not two_levels:
            t = local_type(block.desc(op.output_arg_names[0]).type, others(block.program, block, op), self.coords)
            key = op.type, *[pair for pair in op.attrs.items() if pair[0] != "root"], t
            if key not in self.known:
                found, said = with_algorithm(op, self.between, t, self._ranks(stage), self.job.mesh.links)
                self.known[key] = found.attrs["algorithm"], said
            name, said = self.known[key]
            self.job.say(op, said)
            return op.replace(attrs={**op.attrs, "algorithm": name}) if name else op
        n, t = self._ranks(stage), block.desc(op.output_arg_names[0]).type
        if why := why_no_algorithm(op, t, n):
            self.job.say(op, without_algorithm(op, why))
            return op
        name, said = named(op, self.between, self.hosts, t.nbytes * self.hosts // n, self.job.mesh.links)
        self.job.say(op, said)
        return carried_by(op, f"{inside}/{name or BETWEEN_HOSTS[0]}", n, self.hosts)

    def _ranks(self, stage: SequenceStage) -> int:
        return len(self.block.program.groups[stage.group][0])

    # -- slices -------------------------------------------------------------------------------------------------------------

    def _sliced(self, ops: Sequence[Operator], slicing: Slicing) -> None:
        """Write neighbouring collectives whose slices are in flight together."""
        values = [v for op in ops for v in self._slices(op, slicing)]
        stages = self._stages(ops[0], min(v.stop - v.start for v in values))
        words = [_word(stage, k) for k, stage in enumerate(stages)]
        for wave, now in enumerate(steps(len(values), len(stages), slicing.in_flight)):
            for k, stage in now:
                value = values[k]
                if not stage:
                    self._cut(value)
                # slices at the same stage start their messages together
                self._stage(value, stages[stage], f"{value.name}.{words[stage]}", {"wave": wave} if stages[stage].algorithm else {})
        for op in ops:
            self._join(op, [v.x for v in values if v.op is op])

    def _slices(self, op: Operator, slicing: Slicing) -> list[_InFlight]:
        out = op.output_arg_names[0]
        t = self.block.desc(out).type
        each = t.nbytes // t.numel
        found = slices(t.numel, max(1, slicing.nbytes // each))
        n = min(len(found), slicing.in_flight)
        staged = show_bytes(n * max(b - a for a, b in found) * each)
        stay = f"; finished slices stay until all {show_bytes(t.nbytes)} are there" if len(found) > n else ""
        self.job.log.append(f"%{out}: {len(found)} slice{'s' * (len(found) > 1)} over the rails, {n} at a time: {staged} staged{stay}")
        return [_InFlight(op, f"{out}.slice{k}", op.input_arg_names[0], self._entries(op), a, b) for k, (a, b) in enumerate(found)]

    def _cut(self, value: _InFlight) -> None:
        d = self.block.desc(value.x)
        self.block.declare(Var(value.name, TensorType(d.type.dtype, (value.stop - value.start,)), d.placement, stop_gradient=True))
        attrs = filled("chunk", {"start": value.start, "stop": value.stop})
        self.writer.keep(unary("chunk", value.x, value.name, attrs, value.op.site))
        value.x = value.name

    def _join(self, op: Operator, parts: Sequence[str]) -> None:
        out = op.output_arg_names[0]
        attrs = filled("unpack", {"shapes": (self.block.desc(out).type.shape,)})
        self.writer.keep(make_op("unpack", parts, (out,), attrs, op.site))


def _word(stage: SequenceStage, k: int) -> str:
    return stage.word or f"stage{k + 1}"
