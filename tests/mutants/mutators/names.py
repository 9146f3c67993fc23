"""Names that operators read and write."""

from __future__ import annotations

from random import Random

from fluidx.ir import Operator, Program

from .edit import Edit, Programs, Slots, names_of, on_op, some_op


def other_name(rng: Random, program: Program, block: int, name: str) -> str:
    """A variable to stand in: of the same type mostly, else anything."""
    b = program.blocks[block]
    mine = b.find(name)
    every = [n for n in names_of(program) if n != name] or ["nope"]
    p = rng.random()
    if mine is not None and p < 0.75:
        same = [n for n in every if (d := b.find(n)) is not None and d.type == mine.type]
        kin = [n for n in same if n.split("@")[0].split(".")[0] == name.split("@")[0].split(".")[0]]
        if kin and p < 0.2:
            return rng.choice(kin)
        if same:
            return rng.choice(same)
    return "no_such_variable" if p > 0.98 else rng.choice(every)


def _rename_in(rng: Random, programs: Programs, rank: int, which: str) -> Edit | None:
    program = programs[rank]
    for _ in range(10):
        got = some_op(rng, program)
        if got is not None and (getattr(got[1], which)):
            break
    else:
        return None
    place, op = got
    slots: Slots = getattr(op, which)
    slot = rng.choice(sorted(slots))
    k = rng.randrange(len(slots[slot]))
    new = other_name(rng, program, place.block, slots[slot][k])

    def change(program: Program, ops: list[Operator], at: int) -> bool:
        old: Slots = getattr(ops[at], which)
        if k >= len(old.get(slot, ())):
            return False
        ops[at] = ops[at].replace(**{which: {**old, slot: (*old[slot][:k], new, *old[slot][k + 1 :])}})
        return True

    return on_op(which[:-1], place, f"{slot} {slots[slot][k]} -> {new} of {place}", change)


def read(rng: Random, programs: Programs, rank: int) -> Edit | None:
    return _rename_in(rng, programs, rank, "inputs")


def written(rng: Random, programs: Programs, rank: int) -> Edit | None:
    return _rename_in(rng, programs, rank, "outputs")


def slots(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """Inputs exchanged, left out, given twice."""
    program = programs[rank]
    for _ in range(10):
        got = some_op(rng, program)
        if got is not None and (len(got[1].input_arg_names) > 1 or len(got[1].output_arg_names) > 1):
            break
    else:
        return None
    place, op = got
    which = rng.choice([w for w in ("inputs", "outputs") if getattr(op, w)])
    slots: Slots = getattr(op, which)
    flat = [(s, k) for s in slots for k in range(len(slots[s]))]
    way = rng.choice(["swap", "swap", "drop", "twice", "no slot"])
    if way == "swap" and len(flat) < 2:
        return None
    (s, i), (t, j) = rng.sample(flat, 2) if way == "swap" else (rng.choice(flat), ("", 0))

    def change(program: Program, ops: list[Operator], at: int) -> bool:
        old = {name: list(values) for name, values in getattr(ops[at], which).items()}
        if i >= len(old.get(s, ())) or way == "swap" and j >= len(old.get(t, ())):
            return False
        if way == "swap":
            old[s][i], old[t][j] = old[t][j], old[s][i]
        elif way == "drop":
            del old[s][i]
        elif way == "twice":
            old[s].insert(i, old[s][i])
        else:
            del old[s]
        ops[at] = ops[at].replace(**{which: {name: tuple(values) for name, values in old.items()}})
        return True

    return on_op("slots", place, f"{way} {which} {s}[{i}]{f' {t}[{j}]' if way == 'swap' else ''} of {place}", change)


def renamed(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """From some operator on, another variable is read."""
    if (got := some_op(rng, programs[rank])) is None or not got[1].input_arg_names:
        return None
    place, op = got
    name = rng.choice(op.input_arg_names)
    new = other_name(rng, programs[rank], place.block, name)
    outputs = rng.random() < 0.3

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at:] = [o.renamed({name: new}, outputs) for o in ops[at:]]

    return on_op("rename", place, f"{name} -> {new} {'read and written' if outputs else 'read'} from {place} on", change)


def crossed(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """From some operator on, two variables of one type stand for each other."""
    if (got := some_op(rng, programs[rank])) is None:
        return None
    place, op = got
    names = [*op.input_arg_names, *op.output_arg_names]
    block = programs[rank].blocks[place.block]
    if not names or (mine := block.find(a := rng.choice(names))) is None:
        return None
    same = [n for n in names_of(programs[rank]) if n != a and (d := block.find(n)) is not None and d.type == mine.type]
    kin = [n for n in same if (d := block.find(n)) is not None and d.persistable == mine.persistable]
    if not same:
        return None
    b = rng.choice(kin if kin and rng.random() < 0.7 else same)
    many, outputs = rng.choice([1, 1, 3, 10**6]), rng.random() < 0.5

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at : at + many] = [o.renamed({a: b, b: a}, outputs) for o in ops[at : at + many]]

    how = "read and written" if outputs else "read"
    return on_op("crossed", place, f"{a} and {b} {how} for each other in {many} operators from {place} on", change)
