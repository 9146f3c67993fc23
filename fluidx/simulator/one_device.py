"""A training program as one device would run it: what the closed forms of strategies need to know of it, from one plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..executor.plan.dry_run import dry_plan
from ..executor.plan.records import Plan, Step
from ..ir.memory_spaces import pattern_in
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator, Role
from ..ir.program import Program
from ..ir.var import Var

UPDATES = (Role.OPTIMIZE, Role.LR_SCHED)
_FORWARD = (Role.FORWARD, Role.LOSS)


class Trained(NamedTuple):
    """A parameter with its gradient and its optimizer's state. Numbers are those of the steps of the plan."""

    var: Var
    grad: Var
    made: int  # the step that finishes the gradient
    state: tuple[Var, ...]  # of the optimizer, with as many elements as the parameter
    updates: tuple[int, ...]  # the steps that update it
    forward: tuple[int, int] | None  # its first and last reader in forward
    backward: tuple[int, int] | None  # and in backward
    read: Var  # what these read: the parameter, or a smaller value that is computed from it alone, such as its cast to 16 bits


@dataclass(frozen=True)
class OneDevice:
    """A program's plan for one device with `rows` rows. `seconds` and `roles` are those of its steps. `trained` are in the order in which
    backward finishes their gradients. `other_state` are the bytes of state that belongs to no trained parameter, `shapes` the buffers of
    which the last step reads only the shape, with the last step that reads values: a rank knows the whole shape without them."""

    program: Program
    rows: int
    plan: Plan
    seconds: np.ndarray
    roles: tuple[Role, ...]
    trained: Mapping[str, Trained]
    other_state: int
    shapes: Mapping[int, int]

    @cached_property
    def computing(self) -> np.ndarray:
        """The seconds from the start until each step has ended, without updates."""
        return np.cumsum(np.where([role not in UPDATES for role in self.roles], self.seconds, 0.0))

    @cached_property
    def updating(self) -> float:
        """The seconds of all updates."""
        return float(sum(s for s, role in zip(self.seconds, self.roles, strict=True) if role in UPDATES))

    def update_seconds(self, name: str) -> float:
        """The seconds of the steps that update a parameter."""
        return float(sum(self.seconds[k] for k in self.trained[name].updates))


def one_device(program: Program, rows: int, seconds_of: Callable[[Plan, Step], float], device: str = "cpu") -> OneDevice:
    """Plan a program for one device, "cpu" or "cuda", with `rows` rows. `seconds_of` gives the time of a step.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    ...     _ = fx.optimizer.Adam(0.1).minimize(loss)
    >>> one = one_device(main, 8, lambda plan, step: 1.0)
    >>> {name: [v.name for v in t.state] for name, t in one.trained.items()}
    {'fc_0.b_0': ['fc_0.b_0_moment1_0', 'fc_0.b_0_moment2_0'], 'fc_0.w_0': ['fc_0.w_0_moment1_0', 'fc_0.w_0_moment2_0']}
    """
    plan = dry_plan(program, batch=rows, device=device)
    seconds = np.array([seconds_of(plan, step) for step in plan.steps])
    roles = tuple(step.op.role for step in plan.steps)
    trained = _trained(program, plan)
    own = {v.name for t in trained.values() for v in (t.var, *t.state)}
    other = sum(b.nbytes for b in plan.buffers if b.kind == "state" and b.name not in own)
    return OneDevice(program, rows, plan, seconds, roles, trained, other, _shapes(plan))


def _shapes(plan: Plan) -> dict[int, int]:
    """The last step that reads values of a buffer, of which a later step reads only the shape; small buffers do not matter."""
    least = plan.arena_bytes / 1000
    large = {k for k, b in enumerate(plan.buffers) if b.kind == "arena" and b.nbytes > least}
    found: dict[int, int] = {}
    for k, step in reversed(list(enumerate(plan.steps))):
        for number in {v.buffer for n in step.reads if (v := plan.values.get(n)) is not None} & large:
            if number not in found and (plan.buffers[number].stop != k or _reads_values(plan, step, number)):
                large.discard(number)  # as it was planned
            elif number not in found:
                found[number] = -1
            elif _reads_values(plan, step, number):
                found[number] = k
                large.discard(number)
    return {number: k for number, k in found.items() if k >= 0}


def _reads_values(plan: Plan, step: Step, buffer: int) -> bool:
    return any(v.buffer == buffer for op in step.ops for n in _computed_with(op, plan) if (v := plan.values.get(n)) is not None)


def _trained(program: Program, plan: Plan) -> dict[str, Trained]:
    descs = program.global_block().descs
    made = _gradients(program, plan)
    smaller = _smaller(program, made)
    readers, updates = _readers(plan, made, smaller)
    # by the program: a step of the plan may read the parameter in place of its cast
    ops = [op for op in program.global_block().oplist if op.role not in UPDATES and smaller.keys().isdisjoint(op.output_arg_names)]
    whole = {n for op in ops if not made.keys().isdisjoint(op.input_arg_names) for n in _computed_with(op, plan)}
    read = {param: descs[n] for n, param in smaller.items() if param not in whole}
    found = {}
    for name, (grad, k) in sorted(made.items(), key=lambda item: item[1][1]):
        near = dict.fromkeys(n for at in updates.get(name, ()) for n in plan.steps[at].writes)
        numel = descs[name].type.numel
        state = tuple(descs[n] for n in near if n != name and n in descs and descs[n].persistable and descs[n].type.numel == numel)
        if numel == 1:  # powers of betas are numbers, too, and stay on every rank
            state = ()
        forward, backward = (_ends(readers.get((name, side))) for side in (True, False))
        uses = tuple(updates.get(name, ())), forward, backward, read.get(name, descs[name])
        found[name] = Trained(descs[name], descs[grad], k, state, *uses)
    return found


def _gradients(program: Program, plan: Plan) -> dict[str, tuple[str, int]]:
    """The finished gradient of each trained parameter, and the step that makes it, of which a cast to its dtype may be a part."""
    descs = program.global_block().descs
    steps = {n: k for k, step in enumerate(plan.steps) for op in step.ops for n in op.output_arg_names}
    made: dict[str, tuple[str, int]] = {}
    for op in program.global_block().oplist:
        for param, grad in zip(op.role_var[::2], op.role_var[1::2], strict=True):
            found = [steps[n] for n in (grad, *op.input_arg_names) if n in steps]
            if param in descs and grad in descs and found:
                made[param] = grad, found[0]
    return made


def _smaller(program: Program, params: Container[str]) -> dict[str, str]:
    """The values that an operator computes from one parameter alone, element by element and in fewer bytes -> the parameter."""
    found: dict[str, str] = {}
    for op in program.global_block().oplist:
        if op.role not in UPDATES and len(op.input_arg_names) == len(op.output_arg_names) == 1 and opdef(op.type).effect is Effect.PURE:
            (x,), (out,) = op.input_arg_names, op.output_arg_names
            if (x in params or x in found) and pattern_in(op, program.global_block()).no_axes:
                before, after = (program.global_block().desc(n).type for n in (x, out))
                if after.shape == before.shape and after.nbytes < before.nbytes:
                    found[out] = found.get(x, x)
    return found


def _readers(
    plan: Plan, params: Container[str], smaller: Mapping[str, str]
) -> tuple[dict[tuple[str, bool], list[int]], dict[str, list[int]]]:  # fmt: skip
    """The steps of forward (True) and of backward that compute with a parameter or a smaller value of it, and the steps that update it."""
    readers: dict[tuple[str, bool], list[int]] = {}
    updates: dict[str, list[int]] = {}
    for k, step in enumerate(plan.steps):
        for op in step.ops:
            names = [n for n in op.input_arg_names if n in params or n in smaller]
            if names and op.role in UPDATES:
                for name in names:
                    updates.setdefault(name, []).append(k)
            elif names and smaller.keys().isdisjoint(op.output_arg_names):
                for name in _computed_with(op, plan):
                    if name in params or name in smaller:
                        readers.setdefault((smaller.get(name, name), op.role in _FORWARD), []).append(k)
    return readers, updates


def _computed_with(op: Operator, plan: Plan) -> list[str]:
    """The operands whose values an operator reads, and not only their shapes."""
    definition = opdef(op.type)
    ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
    if op.sub_blocks():
        return list(op.input_arg_names)
    if any(n is not None and n not in plan.values for n in (*ins, *outs)):
        return list(op.input_arg_names)  # a value of a chain that is not stored
    of, to = ([None if n is None else plan.values[n].type for n in names] for names in (ins, outs))
    shape_only = definition.pattern_of(of, to, op.attrs).shape_only
    return [n for k, n in enumerate(ins) if n is not None and k not in shape_only]


def _ends(numbers: list[int] | None) -> tuple[int, int] | None:
    return (numbers[0], numbers[-1]) if numbers else None
