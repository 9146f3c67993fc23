"""Attributes of operators, and what attributes and placements say alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from fluidx.ir import BlockRef, Operator, Program
from fluidx.ir.offsets import Offsets

from .edit import DTYPES, NOWHERE, Edit, Place, Programs, names_of, on_op, some_op

GARBAGE = ("", "nope", "dp ", "0", "sum\n")
_TOLD = ("group", "op", "root", "peer", "batch", "axis", "unit", "bounds", "start", "stop", "seed", "shape", "scale", "dtype")


def attribute(rng: Random, programs: Programs, rank: int) -> Edit | None:
    program = programs[rank]
    for _ in range(10):
        got = some_op(rng, program)
        if got is not None and got[1].attrs:
            break
    else:
        return None
    place, op = got
    p = rng.random()
    if p < 0.02:
        name, value = rng.choice(["nope", "group", "op", "axis", "part", "out", "ctx", "comm"]), rng.choice([0, 1, "dp", True])
    else:
        names = sorted(op.attrs)
        important = [n for n in names if n in ("group", "op", "root", "peer", "batch", "axis", "unit", "bounds", "start", "stop", "shape")]
        name = rng.choice(important if important and rng.random() < 0.4 else names)
        if p < 0.04:

            def drop(program: Program, ops: list[Operator], at: int) -> bool:
                if name not in ops[at].attrs:
                    return False
                ops[at] = ops[at].replace(attrs={k: v for k, v in ops[at].attrs.items() if k != name})
                return True

            return on_op("attribute", place, f"no attribute {name} of {place}", drop)
        value = other_value(rng, program, place, name, op.attrs[name], len(programs))

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(attrs={**ops[at].attrs, name: value})

    return on_op("attribute", place, f"{name}={value!r} (was {op.attrs.get(name)!r}) of {place}", change)


def other_value(rng: Random, program: Program, place: Place, name: str, value: Any, ranks: int) -> Any:
    if rng.random() < 0.04:  # of another type
        return rng.choice([None, "dp", 1.5, True, (), (1,), ("dp",), math.nan, 2, BlockRef(1)])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = [value + 1, value - 1, value + 1, value - 1, value * 2, -value, 0, 1, 2**31, value + 0.5]
        return rng.choice([v for v in (*near, *range(ranks)) if v != value or type(v) is not type(value)])
    if isinstance(value, float):
        near = [
            value + 1, value - 1, value * 2, value * 0.5, -value, 0.0, 1e-17, 1e17, math.nan, math.inf, -math.inf, value * (1 + 1e-3),
            value / ranks, value * ranks, 1.0, value * 1e-17,
        ]  # fmt: skip
        return rng.choice([v for v in near if v != value] or [value + 1])
    if isinstance(value, str):
        known = {o.attrs[name] for b in program.blocks for o in b.oplist if isinstance(o.attrs.get(name), str)}
        if name == "op":
            known |= {"sum", "avg", "max", "min", "prod"}
        if name == "group":
            known |= set(program.groups)
        if name == "dtype" or value in DTYPES:
            known |= set(DTYPES)
        known |= set(rng.sample(GARBAGE, 1))
        return rng.choice(sorted(known - {value}) or ["nope"])
    if isinstance(value, BlockRef):
        return BlockRef(rng.choice([k for k in (*range(len(program.blocks)), 99, -1, place.block) if k != value.idx]))
    if isinstance(value, Offsets):
        made = other_tuple(rng, program, place, name, tuple(value), ranks)
        return Offsets(made) if all(type(v) is int for v in made) else made
    if isinstance(value, tuple):
        return other_tuple(rng, program, place, name, value, ranks)
    return rng.choice(["float32", "float64", 0, 1, 1.0, True])


def other_tuple(rng: Random, program: Program, place: Place, name: str, value: tuple, ranks: int) -> tuple:
    ways: list[Callable[[], tuple]] = [lambda: (*value, *value[-1:]), lambda: value[:-1], lambda: value[1:], tuple, lambda: (*value, 1)]
    if value:

        def one() -> tuple:
            k = rng.randrange(len(value))
            return (*value[:k], other_value(rng, program, place, name, value[k], ranks), *value[k + 1 :])

        def other_name() -> tuple:
            k = rng.randrange(len(value))
            names = [n for n in names_of(program) if n != value[k]]
            return (*value[:k], rng.choice(names or [""]), *value[k + 1 :])

        if all(isinstance(v, str) for v in value):
            ways += [other_name] * 6
        else:
            ways += [one] * 8
    if len(value) > 1:
        ways += [lambda: tuple(reversed(value)), lambda: (*value[1:], value[0]), lambda: (value[1], value[0], *value[2:])] * 2
        if isinstance(value[0], int) and isinstance(value[1], int):
            ways.append(lambda: (value[0] * value[1], *value[2:]))
    return rng.choice(ways)()


def everywhere(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """One value becomes another in all attributes and placements that say it: a lie told consistently."""
    program = programs[rank]
    said = sorted(
        {(k, repr(v)): (k, v) for b in program.blocks for op in b.oplist for k, v in op.attrs.items() if k in _TOLD}.items()
        | {(k, repr(v)): (k, v) for b in program.blocks for d in b.descs.values() for e in d.placement for k, v in fields_of(e)}.items(),
        key=lambda kv: kv[0],
    )
    if not said:
        return None
    name, old = rng.choice(said)[1]
    new = other_value(rng, program, NOWHERE, name, old, len(programs))
    if name == "bounds" and rng.random() < 0.7 and len(old) > 2:  # legal ones
        k = rng.randrange(1, len(old) - 1)
        new = Offsets((*old[:k], rng.choice(range(old[k - 1], old[k + 1] + 1)), *old[k + 1 :]))
    groups_too = rng.random() < 0.3

    def change(program: Program) -> bool:
        for b in program.blocks:
            b.oplist = [op.replace(attrs={**op.attrs, name: new}) if _says(op.attrs, name, old) else op for op in b.oplist]
            for d in list(b.descs.values()):
                try:
                    placement = tuple(with_field(e, name, new) if (name, old) in fields_of(e) else e for e in d.placement)
                except TypeError:  # bounds that are no sequence: no program can hold such an entry
                    return False
                if placement != d.placement:
                    b.descs[d.name] = d._replace(placement=placement)
            if name == "group" and old in program.groups and isinstance(new, str) and groups_too:
                program.groups[new] = program.groups.pop(old)
        return True

    return Edit("everywhere", f"{name} {old!r} is {new!r} in all operators and placements", change)


def _says(attrs: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in attrs and type(attrs[name]) is type(value) and attrs[name] == value


def fields_of(entry: Any) -> list[tuple[str, Any]]:
    return [(f, getattr(entry, f)) for f in entry.__dataclass_fields__]


def with_field(entry: Any, name: str, value: Any) -> Any:
    return type(entry)(**{**dict(fields_of(entry)), name: value})
