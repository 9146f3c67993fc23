"""What is declared of variables."""

from __future__ import annotations

from random import Random
from typing import Any

from fluidx.ir import At, Local, Partial, Pieces, Program, Shard, TensorType, Var

from .attributes import fields_of, other_tuple, other_value, with_field
from .edit import DTYPES, NOWHERE, Edit, Programs


def variable(rng: Random, programs: Programs, rank: int) -> Edit | None:
    program = programs[rank]
    pool = [(b.idx, d) for b in program.blocks for d in b.descs.values()]
    if not pool:
        return None
    p = rng.random()
    placed = [e for e in pool if e[1].placement]
    kept = [e for e in pool if e[1].persistable]
    block, desc = rng.choice(placed if placed and p < 0.4 else kept if kept and p < 0.6 else pool)
    way = rng.choices(["placement", "type", "flag", "attrs", "gone", "name"], [10, 5, 6, 2, 1, 1])[0]
    if way == "gone":

        def gone(program: Program) -> bool:
            return block < len(program.blocks) and program.blocks[block].descs.pop(desc.name, None) is not None

        return Edit("variable", f"no variable {desc.name}", gone)
    if way == "placement":
        field, value = "placement", _other_placement(rng, desc, program, len(programs))
    elif way == "type":
        field, value = "type", _other_type(rng, desc.type)
    elif way == "flag":
        field = rng.choice(["persistable", "persistable", "is_data", "stop_gradient", "is_parameter"])
        value = not getattr(desc, field)
    elif way == "attrs":
        attrs = dict(desc.attrs)
        field = "attrs"
        if attrs and rng.random() < 0.8:
            key = rng.choice(sorted(attrs))
            if rng.random() < 0.4:
                del attrs[key]
            else:
                attrs[key] = other_value(rng, program, NOWHERE, key, attrs[key], len(programs))
        else:
            attrs[rng.choice(["learning_rate", "error_clip", "state_of"])] = rng.choice([0, 1.0, desc.name])
        value = attrs
    else:
        return _renamed(block, desc, f"{desc.name}_other")

    def change(program: Program) -> bool:
        if block >= len(program.blocks) or (old := program.blocks[block].descs.get(desc.name)) is None:
            return False
        program.blocks[block].descs[desc.name] = old._replace(**{field: value})
        return True

    shown = " ".join(map(str, value)) if field == "placement" else repr(value)
    was = " ".join(map(str, desc.placement)) if field == "placement" else repr(getattr(desc, field))
    return Edit("variable", f"{field} of {desc.name} {shown or 'replicate'} (was {was or 'replicate'})", change)


def _renamed(block: int, desc: Var, new: str) -> Edit:
    """Declared under another name; who reads and writes it does not know."""

    def change(program: Program) -> bool:
        if block >= len(program.blocks) or desc.name not in program.blocks[block].descs:
            return False
        descs = program.blocks[block].descs
        descs[new] = descs.pop(desc.name)._replace(name=new)
        return True

    return Edit("variable", f"{desc.name} is declared as {new}", change)


def _other_placement(rng: Random, desc: Var, program: Program, ranks: int) -> tuple:
    group = rng.choice([*program.groups, "dp", "nope"]) if rng.random() < 0.3 or not program.groups else rng.choice(list(program.groups))
    n = max((len(s) for s in program.groups.get(group, ())), default=ranks)
    old = list(desc.placement)
    p = rng.random()
    if old and p < 0.15:
        return ()
    if old and p < 0.55:  # one entry in one field
        k = rng.randrange(len(old))
        entry = old[k]
        field, value = rng.choice(fields_of(entry))
        new: Any
        if field == "group":
            new = rng.choice([g for g in (*program.groups, "nope", "nor") if g != value])
        elif field == "op":
            new = rng.choice([o for o in ("sum", "max", "min", "avg", "nope") if o != value])
        elif field == "bounds":
            new = other_tuple(rng, program, NOWHERE, "bounds", value, ranks)
        else:
            new = rng.choice([v for v in (value + 1, value - 1, value * 2, -value, 0, 1) if v != value])
        old[k] = with_field(entry, field, new)
        return tuple(old)
    size = desc.type.numel if desc.type.numel > 0 else 6
    even = tuple(size * k // n for k in range(n + 1))
    shifted = tuple(min(size, v + 1) if 0 < k < n else v for k, v in enumerate(even))
    entry = rng.choice([
        Shard(0, group), Shard(0, group), Shard(1, group), Shard(0, group, 2), Partial("sum", group), Partial("max", group), At(0, group),
        At(n - 1, group), Pieces(even, group), Pieces(shifted, group), Local(group), Local(),
    ])  # fmt: skip
    return (*old, entry) if old and rng.random() < 0.2 else tuple(reversed(old)) if len(old) > 1 and rng.random() < 0.3 else (entry,)


def _other_type(rng: Random, old: TensorType) -> TensorType:
    shape = list(old.shape)
    if not shape or rng.random() < 0.3:
        return old.with_dtype(rng.choice([d for d in DTYPES if d != old.dtype]))
    k = rng.randrange(len(shape))
    way = rng.choice(["more", "less", "open", "double", "drop", "add", "turn", "one"])
    if way == "drop":
        del shape[k]
    elif way == "add":
        shape.insert(k, 1)
    elif way == "turn":
        shape.reverse()
    else:
        shape[k] = {"more": shape[k] + 1, "less": max(0, shape[k] - 1), "open": -1, "double": shape[k] * 2, "one": 1}[way]
    return old.with_shape(shape)
