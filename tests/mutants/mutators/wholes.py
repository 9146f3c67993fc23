"""Programs as wholes."""

from __future__ import annotations

from random import Random
from typing import Any

from fluidx.ir import Program

from .edit import Edit, Programs


def groups(rng: Random, programs: Programs, rank: int) -> Edit | None:
    groups = programs[rank].groups
    if not groups:
        return None
    name = rng.choice(list(groups))
    sets = [list(s) for s in groups[name]]
    k = rng.randrange(len(sets)) if sets else 0
    way = rng.choice(["turn", "drop", "double", "add", "gone", "renamed", "no sets", "turn sets", "twice", "join", "other"])
    n = len(programs)
    if not sets:
        way = "gone"
    if way == "turn":
        rng.shuffle(sets[k])
    elif way == "drop":
        del sets[k][rng.randrange(len(sets[k]))]
    elif way == "double":
        sets[k].append(rng.choice(sets[k]))
    elif way == "add":
        sets[k].append(rng.choice([*range(n + 1), -1]))
    elif way == "no sets":
        sets = []
    elif way == "turn sets":
        sets.reverse()
    elif way == "twice":
        sets.append(list(sets[k]))
    elif way == "join":
        sets = [[r for s in sets for r in s]]
    new = tuple(tuple(s) for s in sets)
    to = rng.choice([g for g in (*groups, "nope", "nor") if g != name])

    def change(program: Program) -> bool:
        if name not in program.groups:
            return False
        if way == "gone":
            del program.groups[name]
        elif way == "renamed":
            program.groups[to] = program.groups.pop(name)
        elif way == "other":
            program.groups[name] = program.groups.get(to, ((0,),))
        else:
            program.groups[name] = new
        return True

    return Edit("groups", f"group {name} {way}: {new if way not in ('gone', 'renamed', 'other') else to} (was {groups[name]})", change)


def program(rng: Random, programs: Programs, rank: int) -> Edit | None:
    n = len(programs)
    field = rng.choice(["rank", "random_seed", "parent"])
    value: Any
    if field == "parent":
        if len(programs[rank].blocks) < 2:
            return None
        k = rng.randrange(1, len(programs[rank].blocks))
        value = rng.choice([-1, *range(k)])  # a cycle is no program at all

        def parent(program: Program) -> bool:
            if k >= len(program.blocks):
                return False
            program.blocks[k].parent_idx = value
            return True

        return Edit("program", f"block {k} inside block {value}", parent)
    value = rng.choice([None, -1, n, *range(n)]) if field == "rank" else rng.choice([0, 1, 8])

    def change(program: Program) -> bool:
        setattr(program, field, value)
        return True

    return Edit("program", f"{field} {value!r} (was {getattr(programs[rank], field)!r})", change)
