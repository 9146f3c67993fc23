"""PlaceValues: split the batch over the group `dp` and work out where every value of the program lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.errors import ProgramError, TranspileError, nearest
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Operator, Role
from ..ir.placement import Placed, default_place, flat
from ..ir.program import Block, Program, Var
from ..ir.types import ANY, REPLICATE, At, Partial, Placement, Shard
from .rewrite import Job, Pass

_GRADIENT_ROLES = (Role.BACKWARD,)


@dataclass(frozen=True)
class PlaceValues(Pass):
    """Give every data variable with an open batch axis `shard(0)`, and every other value the place that follows.

    A forward operator's place follows from its rule. A gradient lies where its value lies, and the gradient of a replicated
    value is one term on each rank: backward operators are linear in the gradients they pass on.
    """

    group: str = "dp"
    loss: str = ""

    def run(self, job: Job) -> None:
        program = job.main
        block = program.global_block()
        data = [d for d in block.descs.values() if d.is_data]
        split = [d for d in data if d.type.shape and d.type.shape[0] == ANY]
        if data and not split:
            listed = ", ".join(f"{d.name!r} {d.type}" for d in data[:5])
            raise TranspileError(
                f"{program.label()} has no input with an open batch axis to split among the ranks: {listed}; declare it with -1 as axis 0"
            )
        for d in split:
            block.descs[d.name] = d.changed(placement=(Shard(0, self.group),))
        losses = [op for op in block.oplist if op.role is Role.LOSS]
        has_backward = any(op.role is Role.BACKWARD for op in block.oplist)
        if self.loss and self.loss not in [n for op in losses for n in op.output_arg_names]:
            named = [n for op in losses for n in op.output_arg_names]
            if not has_backward:
                raise TranspileError(
                    f"{program.label()} has no gradients, so {self.loss!r} is not its loss; call optimizer.minimize(loss) before transpile"
                )
            raise TranspileError(f"{program.label()} has no loss {self.loss!r}; {nearest(self.loss, named, 'its loss is')}")
        if any(op.role is Role.OPTIMIZE for op in block.oplist) and not has_backward:
            raise TranspileError(f"{program.label()} has optimizer operators but no gradients; build it with optimizer.minimize(loss)")
        if has_backward:
            self._check_gradients(job, losses)
        self._place_block(job, block)
        if losses:
            self._loss(job, losses, block)

    @staticmethod
    def _check_gradients(job: Job, losses: list[Operator]) -> None:
        """Refuse what would give other values on ranks that see their own rows only: they hold terms of gradients, not gradients."""
        if not losses:
            raise TranspileError(
                f"{job.main.label()} has gradients, but no loss that they are of: fx.gradients names none; "
                "use append_backward(loss) or optimizer.minimize(loss)"
            )
        if job.world_size == 1:
            return
        gradients: set[str] = set()
        for op in job.main.global_block().oplist:
            if op.role is Role.BACKWARD:
                gradients.update(op.output_arg_names)
                if op.type == "clip":
                    raise TranspileError(
                        "an ErrorClip limits a gradient inside the backward part, before the terms of all ranks are added up, so ranks "
                        f"would not give one device's values; use grad_clip of the optimizer{_where(op)}"
                    )
            elif op.role in (Role.FORWARD, Role.LOSS) and gradients:
                read = next((n for n in op.input_arg_names if n in gradients), None)
                if read is not None:
                    raise TranspileError(
                        f"op {op.type} of the forward part reads the gradient {read!r}, which each rank has for its own rows only; "
                        f"programs with gradients of gradients run on one rank{_where(op)}"
                    )

    def _loss(self, job: Job, losses: list[Operator], block: Block) -> None:
        names = [op.output_arg_names[0] for op in losses]
        found = {self._loss_op(block.descs[n].placement) for n in names}
        if None in found:
            bad = next(n for n in names if self._loss_op(block.descs[n].placement) is None)
            place = block.descs[bad].placement
            if place:
                raise TranspileError(
                    f"the loss {bad!r} is {' '.join(map(str, place))}; reduce it over the batch with mean or reduce_sum before minimize"
                )
            raise TranspileError(
                f"the loss {bad!r} does not depend on any input that is split among the ranks; "
                "declare the data that it is computed from with an open batch axis: fx.data(name, [-1, ...])"
            )
        if len(found) > 1:
            word = {"avg": "mean", "sum": "sum"}
            listed = ", ".join(f"{n!r} is a {word[self._loss_op(block.descs[n].placement) or 'sum']} over the batch" for n in names)
            raise TranspileError(
                f"the losses must combine over the ranks in one way: {listed}; make all of them means, or all of them sums"
            )
        job.loss, job.loss_op = names[0], found.pop() or ""
        self._place_gradients(job, block)

    def _loss_op(self, placement: Placement) -> str | None:
        for p in placement:
            if isinstance(p, Partial) and p.group == self.group and p.op in ("avg", "sum"):
                return p.op
        return None

    # -- forward ------------------------------------------------------------------------------------------------------------

    def _place_block(self, job: Job, block: Block) -> None:
        descs = block.descs
        for op in block.oplist:
            if op.role in (Role.FORWARD, Role.LOSS):
                self._place_op(job, block, op, descs)

    def _place_op(self, job: Job, block: Block, op: Operator, descs: dict[str, Var]) -> None:
        inputs = {slot: [descs.get(n) or block.desc(n) for n in names] for slot, names in op.inputs.items()}
        if op.sub_blocks():
            for idx in op.sub_blocks():
                self._control(job, op, _placed(inputs), idx)
            self._control_outputs(block, op)
            return
        if not any(d.placement for ds in inputs.values() for d in ds):
            return
        definition = opdef(op.type)
        many = len(definition.out_slots) > 1
        # a model repeats its layers: the same op on the same types and places has the same result
        key = (op.type, tuple(op.attrs.items()), tuple((s, tuple((d.type, d.placement) for d in ds)) for s, ds in inputs.items()))
        result = job.places.get(key)
        if result is None:
            result = job.places[key] = self._rule(op, definition, _placed(inputs))
        for out_slot, place in zip(definition.out_slots, result if many else (result,), strict=True):
            names = op.outputs.get(out_slot.name, ())
            places = place if isinstance(place, list) else [place] * len(names)
            for n, p in zip(names, places, strict=True):
                self._set(job, block, op, n, p)

    def _rule(self, op: Operator, definition: type[OpDef], placed: dict[str, list[Placed]]) -> Any:
        rule = definition.place or default_place
        try:
            return rule(*definition.arrange(placed), **op.attrs)
        except ProgramError as e:
            sums = [p.name for p in flat(definition.arrange(placed)) if p.on(self.group) == Partial("sum", self.group)]
            hint = "is a sum over the batch, and a replicated term would be counted once per rank: use a mean"
            hint = f"; {sums[0]!r} {hint}" if sums else ""
            raise TranspileError(f"op {op.type} cannot run on rows split over {self.group}: {e}{hint}{_where(op)}") from None

    def _set(self, job: Job, block: Block, op: Operator, name: str, place: Placement) -> None:
        d = block.find(name)
        assert d is not None
        if d.persistable and place != d.placement:
            note = f"{name} is kept by each rank for its own rows ({op.type})"
            if note not in job.notes:
                job.notes.append(note)
        owner: Block | None = block
        while owner is not None and name not in owner.descs:
            owner = owner.parent
        assert owner is not None
        if place != d.placement:
            owner.descs[name] = d.changed(placement=place)

    def _control(self, job: Job, op: Operator, placed: dict[str, list[Placed]], idx: int) -> None:
        for slot in ("Cond", "Condition"):
            for p in placed.get(slot, ()):
                if p.placement:
                    raise TranspileError(
                        f"op {op.type} decides by %{p.name}, which is {' '.join(map(str, p.placement))}: ranks could take different "
                        "branches; decide by a replicated value" + (f"\n  written at {op.site}" if op.site else "")
                    )
        self._place_block(job, job.main.blocks[idx])

    def _control_outputs(self, block: Block, op: Operator) -> None:
        program = block.program
        for k, out in enumerate(op.output_arg_names):
            places = []
            for idx, attr in ((op.attrs.get("true_block"), "true_out"), (op.attrs.get("false_block"), "false_out")):
                if idx is not None:
                    found = program.blocks[idx.idx].find(op.attrs[attr][k])
                    places.append(found.placement if found else REPLICATE)
            if len(set(places)) > 1:
                raise TranspileError(
                    f"op {op.type}: the branches leave %{out} in different places" + (f"\n  written at {op.site}" if op.site else "")
                )
            if places and out in block.descs:
                block.descs[out] = block.descs[out].changed(placement=places[0])

    # -- backward -----------------------------------------------------------------------------------------------------------

    def _place_gradients(self, job: Job, block: Block) -> None:
        descs = block.descs
        term = (Partial(job.loss_op, self.group),)
        for op in block.oplist:
            if op.role not in _GRADIENT_ROLES:
                continue
            local = any(descs[n].placement for n in op.input_arg_names if n in descs)
            for n in op.output_arg_names:
                d = descs.get(n)
                if d is None or d.persistable:
                    continue
                base = descs.get(n.split("@GRAD")[0]) if "@GRAD" in n else None
                of_base = next(iter(base.placement), None) if base is not None else None
                if isinstance(of_base, Partial):
                    continue  # the gradient of a sum over ranks is the same for every term
                if isinstance(of_base, Shard):
                    place: Placement = (of_base,)
                elif ANY in d.type.shape:
                    place = (Shard(d.type.shape.index(ANY), self.group),)
                elif local or base is not None:
                    place = term
                else:
                    continue
                descs[n] = d.changed(placement=place)


def _where(op: Operator) -> str:
    return f"\n  in {op.to_string()}" + (f"\n  written at {op.site}" if op.site else "")


def _placed(inputs: dict[str, list[Var]]) -> dict[str, list[Placed]]:
    return {slot: [Placed(d.name, d.type, d.placement) for d in ds] for slot, ds in inputs.items()}


def is_trainable_pair(descs: dict[str, Var], op: Operator) -> list[tuple[str, str]]:
    """The (param, grad) pairs that an operator finishes."""
    names: Any = op.role_var
    if not names:
        return []
    return [(names[k], names[k + 1]) for k in range(0, len(names), 2) if names[k] in descs]


def reduced_name(grad: str, op: str) -> str:
    """`w@GRAD.avg`, `w@GRAD.sum`."""
    return f"{grad}.{op}"


def collect_pairs(program: Program) -> list[tuple[str, str]]:
    """Every (param, grad) of a program in the order in which the gradients are finished."""
    descs = program.global_block().descs
    return [pair for op in program.global_block().oplist for pair in is_trainable_pair(descs, op)]


__all__ = ["At", "PlaceValues", "collect_pairs", "is_trainable_pair", "reduced_name"]
