"""Operators as wholes: gone, again, elsewhere, another."""

from __future__ import annotations

from random import Random
from typing import Any

from fluidx.ir import OPS, Operator, Program, Role

from .edit import Edit, Place, Programs, completed, names_of, on_op, some_op


def delete(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None

    def change(program: Program, ops: list[Operator], at: int) -> None:
        del ops[at]

    return on_op("delete", got[0], f"delete {got[0]}", change)


def duplicate(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None
    by = rng.choice([1, 1, 1, 2, 5, 1000])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops.insert(min(at + by, len(ops)), ops[at])

    return on_op("duplicate", got[0], f"again, {by} later: {got[0]}", change)


def swap(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None
    ops = programs[rank].blocks[got[0].block].oplist
    at = got[0].find(programs[rank])
    if len(ops) < 2 or at is None:
        return None
    other = at + 1 if rng.random() < 0.5 and at + 1 < len(ops) else rng.randrange(len(ops))
    with_ = Place.of(programs[rank], got[0].block, other)

    def change(program: Program, ops: list[Operator], at: int) -> bool:
        to = with_.find(program)
        if to is None:
            return False
        ops[at], ops[to] = ops[to], ops[at]
        return True

    return on_op("swap", got[0], f"exchange {got[0]} with {with_}", change)


def move(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None
    by = rng.choice([-1000, -7, -3, -2, -1, 1, 2, 3, 7, 1000])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        op = ops.pop(at)
        ops.insert(max(0, min(at + by, len(ops))), op)

    return on_op("move", got[0], f"move by {by}: {got[0]}", change)


def cut_short(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None
    behind = rng.random() < 0.5

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[:] = ops[: at + 1] if behind else ops[at:]

    return on_op("cut", got[0], f"only what stands {'up to' if behind else 'from'} {got[0]}", change)


def other_type(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """Another op of the same slots."""
    if (got := some_op(rng, programs[rank])) is None:
        return None
    place, op = got
    if op.type not in OPS:
        return None
    mine = OPS[op.type]
    same = [
        d.name
        for d in OPS.values()
        if d.name != op.type and set(op.inputs) <= {s.name for s in d.in_slots} and set(op.outputs) <= {s.name for s in d.out_slots}
    ]
    near = [n for n in same if OPS[n].effect is mine.effect and set(OPS[n].attrs) & set(mine.attrs)]
    if not same:
        return None
    name = rng.choice(near if near and rng.random() < 0.6 else same)
    attrs = completed(name, {k: v for k, v in op.attrs.items() if k in OPS[name].attrs})
    if attrs is None:
        return None

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(type=name, attrs=attrs)

    return on_op("type", place, f"{name} in place of {place}", change)


def other_role(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := some_op(rng, programs[rank])) is None:
        return None
    place, op = got
    what = rng.choice(["role", "role", "role_var", "device"])
    value: Any
    if what == "role":
        value = rng.choice([r for r in Role if r is not op.role])
    elif what == "role_var":
        value = rng.choice([(), tuple(reversed(op.role_var)), tuple(rng.sample(names_of(programs[rank]), 2))])
    else:
        value = rng.choice(["gpu:0", "gpu:1", "cpu", "nope"])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(**{what: value})

    return on_op("role", place, f"{what} {value!r} of {place}", change)
