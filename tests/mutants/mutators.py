"""Random damage to the programs of some ranks, by what a Program is made of and not by what a strategy means by it.

`draw(rng, mains, startups)` gives a Mutant: changed copies, and one line that says what was changed. The same generator state gives the
same mutant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from fluidx.ir import OPS, At, BlockRef, Local, Operator, Partial, Pieces, Program, ProgramError, Role, Shard, TensorType, Var

Slots = Mapping[str, tuple[str, ...]]
Programs = Sequence[Program]
DTYPES = ("float32", "float64", "float16", "int64", "int32", "bool", "uint8")
GARBAGE = ("", "nope", "dp ", "0", "sum\n")


class Mutant(NamedTuple):
    text: str
    kind: str  # the mutators' names
    mains: tuple[Program, ...]
    startups: tuple[Program, ...]


@dataclass(frozen=True)
class Edit:
    """One change of one program; `apply` says whether it found its place."""

    kind: str
    text: str
    apply: Callable[[Program], bool]


class Place(NamedTuple):
    """An operator of a program, named so that it is found again in another rank's program."""

    block: int
    type: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nth: int

    @staticmethod
    def of(program: Program, block: int, index: int) -> Place:
        ops = program.blocks[block].oplist
        op = ops[index]
        twins = [k for k, o in enumerate(ops) if _alike(o, op)]
        return Place(block, op.type, op.input_arg_names, op.output_arg_names, twins.index(index))

    def find(self, program: Program) -> int | None:
        if self.block >= len(program.blocks):
            return None
        ops = program.blocks[self.block].oplist
        alike = [k for k, o in enumerate(ops) if o.type == self.type and o.output_arg_names == self.writes]
        exact = [k for k in alike if ops[k].input_arg_names == self.reads]
        found = exact or (alike if self.writes else [])  # what a ring's rank reads is not what another one reads
        return found[min(self.nth, len(found) - 1)] if found else None

    def __str__(self) -> str:
        where = f"block {self.block}: " if self.block else ""
        nth = f" (number {self.nth})" if self.nth else ""
        return f"{where}{', '.join(self.writes) or '-'} = {self.type}({', '.join(self.reads)}){nth}"


def _alike(a: Operator, b: Operator) -> bool:
    return a.type == b.type and a.output_arg_names == b.output_arg_names and a.input_arg_names == b.input_arg_names


def changed_copy(program: Program) -> Program:
    """A copy that may be written to."""
    new = program.copy()
    new.frozen = False
    new.rank, new.strategy, new.random_seed = program.rank, program.strategy, program.random_seed
    return new


def draw(rng: Random, mains: Programs, startups: Programs) -> Mutant:
    """One mutant; every eighth carries two changes."""
    texts, kinds = [], []
    old = mains, startups
    for _ in range(2 if rng.random() < 0.12 else 1):
        for _ in range(50):
            got = _one(rng, mains, startups)
            if got is not None:
                text, kind, mains, startups = got
                texts.append(text)
                kinds.append(kind)
                break
    if _same(old, (mains, startups)):
        return draw(rng, *old)
    return Mutant("; ".join(texts), "+".join(kinds), tuple(mains), tuple(startups))


def _same(a: tuple[Programs, ...], b: tuple[Programs, ...]) -> bool:
    return all(_equal(p, q) for ps, qs in zip(a, b, strict=True) for p, q in zip(ps, qs, strict=True))


def _equal(p: Program, q: Program) -> bool:
    if p is q:
        return True
    # a NaN or a 1.0 for a 1 makes attributes that compare oddly; the text tells them apart
    return p == q and [b.parent_idx for b in p.blocks] == [b.parent_idx for b in q.blocks] and _shown(p) == _shown(q)


def _shown(p: Program) -> list[str]:
    return [repr((o.type, sorted(o.attrs.items(), key=str))) for b in p.blocks for o in b.oplist]


def _one(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    n = len(mains)
    startup = rng.random() < 0.2
    programs: Programs = startups if startup else mains
    if n > 1 and rng.random() < 0.06:
        way = rng.choices([_exchanged, _message, _no_message], [1, 4, 2])[0]
        return way(rng, mains, startups)
    rank = rng.randrange(n)
    p = rng.random()
    ranks = [rank] if p < 0.45 or n == 1 else list(range(n)) if p < 0.85 else sorted({rank, (rank + rng.randrange(1, n)) % n})
    edit = _edit(rng, programs, rank)
    if edit is None:
        return None
    both = edit.kind in ("variable", "groups", "everywhere", "program") and rng.random() < 0.4
    hit = {"main": _applied(edit, mains, ranks if both or not startup else []), "startup": []}
    hit["startup"] = _applied(edit, startups, ranks if both or startup else [])
    if not any(hit.values()):
        return None
    told = [f"{name} of {_ranks(n, [r for r, _ in got])}" for name, got in hit.items() if got]
    mains, startups = list(mains), list(startups)
    for programs, got in ((mains, hit["main"]), (startups, hit["startup"])):
        for r, new in got:
            programs[r] = new
    return f"{' and '.join(told)}: {edit.text}", edit.kind, mains, startups


def _applied(edit: Edit, programs: Programs, ranks: Sequence[int]) -> list[tuple[int, Program]]:
    found = []
    for r in ranks:
        copy = changed_copy(programs[r])
        if edit.apply(copy) and not _equal(copy, programs[r]):
            found.append((r, copy))
    return found


def _ranks(n: int, hit: Sequence[int]) -> str:
    return "all ranks" if len(hit) == n else f"rank{'s' * (len(hit) > 1)} {', '.join(map(str, hit))}"


def _exchanged(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, list[Program], Programs]:
    """Two ranks run each other's main program."""
    a, b = rng.sample(range(len(mains)), 2)
    keep = rng.random() < 0.5
    new = list(mains)
    for to, source in ((a, b), (b, a)):
        new[to] = changed_copy(mains[source])
        new[to].rank = mains[to if keep else source].rank
    return f"ranks {a} and {b} exchange their main programs{', not their numbers' if keep else ''}", "exchange", new, startups


def _message(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    """One rank sends a value, and another one takes it for its own: a pair that matches."""
    startup = rng.random() < 0.2
    programs = list(startups if startup else mains)
    a, b = rng.sample(range(len(programs)), 2)
    if (got := _some_op(rng, programs[a])) is None or not got[1].output_arg_names or not programs[a].groups:
        return None
    place, op = got
    x = rng.choice(op.output_arg_names)
    desc, group = programs[a].blocks[place.block].find(x), rng.choice(sorted(programs[a].groups))
    if desc is None or -1 in desc.type.shape:
        return None
    y = x if rng.random() < 0.7 else _other_name(rng, programs[b], place.block, x)
    sizes = {"shape": tuple(desc.type.shape), "dtype": desc.type.dtype}
    ends = (
        (a, "send", {"X": (x,)}, {}, {"group": group, "peer": b}),
        (b, "recv", {}, {"Out": (y,)}, {"group": group, "peer": a, **{k: v for k, v in sizes.items() if k in OPS["recv"].attrs}}),
    )
    for r, type_, ins, outs, attrs in ends:
        programs[r] = changed_copy(programs[r])
        at = place.find(programs[r])
        complete = _completed(type_, attrs)
        if at is None or complete is None:
            return None
        programs[r].blocks[place.block].oplist.insert(at + 1, Operator(type_, ins, outs, complete, Role.DIST))
    text = f"{'startup' if startup else 'main'}: rank {a} sends {x}, rank {b} receives it as {y}, behind {place}"
    return (text, "message", mains, programs) if startup else (text, "message", programs, startups)


def _no_message(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    """A send and the recv that takes it, both gone."""
    programs = list(mains)
    a = rng.randrange(len(programs))
    sends = [(k, op) for k, op in enumerate(programs[a].blocks[0].oplist) if op.type == "send"]
    if not sends:
        return None
    k, op = rng.choice(sends)
    b = op.attrs.get("peer")
    if not isinstance(b, int) or not 0 <= b < len(programs) or b == a:
        return None
    nth = [i for i, o in sends if o.attrs.get("peer") == b].index(k)
    takes = [i for i, o in enumerate(programs[b].blocks[0].oplist) if o.type == "recv" and o.attrs.get("peer") == a]
    if nth >= len(takes):
        return None
    for r, at in ((a, k), (b, takes[nth])):
        programs[r] = changed_copy(programs[r])
        del programs[r].blocks[0].oplist[at]
    return f"main: {Place.of(mains[a], 0, k)} of rank {a} and its recv on rank {b} are gone", "no message", programs, startups


# -- choosing ---------------------------------------------------------------------------------------------------------------------


def _edit(rng: Random, programs: Programs, rank: int) -> Edit | None:
    makers: list[tuple[float, Callable[[Random, Programs, int], Edit | None]]] = [
        (10, _delete), (6, _duplicate), (6, _swap), (12, _move), (24, _attribute), (10, _input), (6, _output), (4, _slots),
        (4, _role), (4, _type), (12, _insert), (12, _variable), (3, _groups), (2, _program), (2, _rename), (2, _cut_short),
        (4, _everywhere), (5, _crossed), (2, _there_and_back),
    ]  # fmt: skip
    make = rng.choices([m for _, m in makers], [w for w, _ in makers])[0]
    return make(rng, programs, rank)


def _some_op(rng: Random, program: Program) -> tuple[Place, Operator] | None:
    """An operator; rare types and what only a strategy writes come as often as the many of a model."""
    every = [(b.idx, k, o) for b in program.blocks for k, o in enumerate(b.oplist)]
    if not every:
        return None
    p = rng.random()
    if p < 0.35:
        dist = [e for e in every if e[2].role is Role.DIST or e[2].type in ("send", "recv") or "group" in e[2].attrs]
        every = dist or every
    elif p < 0.5:
        inner = [e for e in every if e[0] or e[2].sub_blocks()]
        every = inner or every
    if rng.random() < 0.5:
        types = sorted({e[2].type for e in every})
        chosen = rng.choice(types)
        every = [e for e in every if e[2].type == chosen]
    block, k, op = rng.choice(every)
    return Place.of(program, block, k), op


def _on_op(kind: str, place: Place, text: str, change: Callable[[Program, list[Operator], int], bool | None]) -> Edit:
    def apply(program: Program) -> bool:
        at = place.find(program)
        if at is None:
            return False
        return change(program, program.blocks[place.block].oplist, at) is not False

    return Edit(kind, text, apply)


# -- operators as wholes ------------------------------------------------------------------------------------------------------------


def _delete(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
        return None

    def change(program: Program, ops: list[Operator], at: int) -> None:
        del ops[at]

    return _on_op("delete", got[0], f"delete {got[0]}", change)


def _duplicate(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
        return None
    by = rng.choice([1, 1, 1, 2, 5, 1000])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops.insert(min(at + by, len(ops)), ops[at])

    return _on_op("duplicate", got[0], f"again, {by} later: {got[0]}", change)


def _swap(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
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

    return _on_op("swap", got[0], f"exchange {got[0]} with {with_}", change)


def _move(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
        return None
    by = rng.choice([-1000, -7, -3, -2, -1, 1, 2, 3, 7, 1000])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        op = ops.pop(at)
        ops.insert(max(0, min(at + by, len(ops))), op)

    return _on_op("move", got[0], f"move by {by}: {got[0]}", change)


def _cut_short(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
        return None
    behind = rng.random() < 0.5

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[:] = ops[: at + 1] if behind else ops[at:]

    return _on_op("cut", got[0], f"only what stands {'up to' if behind else 'from'} {got[0]}", change)


def _type(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """Another op of the same slots."""
    if (got := _some_op(rng, programs[rank])) is None:
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
    attrs = _completed(name, {k: v for k, v in op.attrs.items() if k in OPS[name].attrs})
    if attrs is None:
        return None

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(type=name, attrs=attrs)

    return _on_op("type", place, f"{name} in place of {place}", change)


def _completed(name: str, attrs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return OPS[name].complete_attrs(attrs)
    except ProgramError:
        return None


def _role(rng: Random, programs: Programs, rank: int) -> Edit | None:
    if (got := _some_op(rng, programs[rank])) is None:
        return None
    place, op = got
    what = rng.choice(["role", "role", "role_var", "device"])
    value: Any
    if what == "role":
        value = rng.choice([r for r in Role if r is not op.role])
    elif what == "role_var":
        value = rng.choice([(), tuple(reversed(op.role_var)), tuple(rng.sample(_names(programs[rank]), 2))])
    else:
        value = rng.choice(["gpu:0", "gpu:1", "cpu", "nope"])

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(**{what: value})

    return _on_op("role", place, f"{what} {value!r} of {place}", change)


# -- attributes ---------------------------------------------------------------------------------------------------------------------


def _attribute(rng: Random, programs: Programs, rank: int) -> Edit | None:
    program = programs[rank]
    for _ in range(10):
        got = _some_op(rng, program)
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

            return _on_op("attribute", place, f"no attribute {name} of {place}", drop)
        value = _other_value(rng, program, place, name, op.attrs[name], len(programs))

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at] = ops[at].replace(attrs={**ops[at].attrs, name: value})

    return _on_op("attribute", place, f"{name}={value!r} (was {op.attrs.get(name)!r}) of {place}", change)


def _other_value(rng: Random, program: Program, place: Place, name: str, value: Any, ranks: int) -> Any:
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
    if isinstance(value, tuple):
        return _other_tuple(rng, program, place, name, value, ranks)
    return rng.choice(["float32", "float64", 0, 1, 1.0, True])


def _other_tuple(rng: Random, program: Program, place: Place, name: str, value: tuple, ranks: int) -> tuple:
    ways: list[Callable[[], tuple]] = [lambda: (*value, *value[-1:]), lambda: value[:-1], lambda: value[1:], tuple, lambda: (*value, 1)]
    if value:

        def one() -> tuple:
            k = rng.randrange(len(value))
            return (*value[:k], _other_value(rng, program, place, name, value[k], ranks), *value[k + 1 :])

        def other_name() -> tuple:
            k = rng.randrange(len(value))
            names = [n for n in _names(program) if n != value[k]]
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


def _everywhere(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """One value becomes another in all attributes and placements that say it: a lie told consistently."""
    program = programs[rank]
    said = sorted(
        {(k, repr(v)): (k, v) for b in program.blocks for op in b.oplist for k, v in op.attrs.items() if k in _TOLD}.items()
        | {(k, repr(v)): (k, v) for b in program.blocks for d in b.descs.values() for e in d.placement for k, v in _fields(e)}.items(),
        key=lambda kv: kv[0],
    )
    if not said:
        return None
    name, old = rng.choice(said)[1]
    new = _other_value(rng, program, Place(0, "", (), (), 0), name, old, len(programs))
    if name == "bounds" and rng.random() < 0.7 and len(old) > 2:  # legal ones
        k = rng.randrange(1, len(old) - 1)
        new = (*old[:k], rng.choice(range(old[k - 1], old[k + 1] + 1)), *old[k + 1 :])

    def change(program: Program) -> bool:
        for b in program.blocks:
            b.oplist = [op.replace(attrs={**op.attrs, name: new}) if _says(op.attrs, name, old) else op for op in b.oplist]
            for d in list(b.descs.values()):
                placement = tuple(_with(e, name, new) if (name, old) in _fields(e) else e for e in d.placement)
                if placement != d.placement:
                    b.descs[d.name] = d._replace(placement=placement)
            if name == "group" and old in program.groups and isinstance(new, str) and rng_groups:
                program.groups[new] = program.groups.pop(old)
        return True

    rng_groups = rng.random() < 0.3
    return Edit("everywhere", f"{name} {old!r} is {new!r} in all operators and placements", change)


_TOLD = ("group", "op", "root", "peer", "batch", "axis", "unit", "bounds", "start", "stop", "seed", "shape", "scale", "dtype")


def _says(attrs: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in attrs and type(attrs[name]) is type(value) and attrs[name] == value


def _fields(entry: Any) -> list[tuple[str, Any]]:
    return [(f, getattr(entry, f)) for f in entry.__dataclass_fields__]


def _with(entry: Any, name: str, value: Any) -> Any:
    return type(entry)(**{**dict(_fields(entry)), name: value})


# -- names that operators read and write ----------------------------------------------------------------------------------------------


def _names(program: Program) -> list[str]:
    return [n for b in program.blocks for n in b.descs] or ["nope", "nor"]


def _other_name(rng: Random, program: Program, block: int, name: str) -> str:
    """A variable to stand in: of the same type mostly, else anything."""
    b = program.blocks[block]
    mine = b.find(name)
    every = [n for n in _names(program) if n != name] or ["nope"]
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
        got = _some_op(rng, program)
        if got is not None and (getattr(got[1], which)):
            break
    else:
        return None
    place, op = got
    slots: Slots = getattr(op, which)
    slot = rng.choice(sorted(slots))
    k = rng.randrange(len(slots[slot]))
    new = _other_name(rng, program, place.block, slots[slot][k])

    def change(program: Program, ops: list[Operator], at: int) -> bool:
        old: Slots = getattr(ops[at], which)
        if k >= len(old.get(slot, ())):
            return False
        ops[at] = ops[at].replace(**{which: {**old, slot: (*old[slot][:k], new, *old[slot][k + 1 :])}})
        return True

    return _on_op(which[:-1], place, f"{slot} {slots[slot][k]} -> {new} of {place}", change)


def _input(rng: Random, programs: Programs, rank: int) -> Edit | None:
    return _rename_in(rng, programs, rank, "inputs")


def _output(rng: Random, programs: Programs, rank: int) -> Edit | None:
    return _rename_in(rng, programs, rank, "outputs")


def _slots(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """Inputs exchanged, left out, given twice."""
    program = programs[rank]
    for _ in range(10):
        got = _some_op(rng, program)
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

    return _on_op("slots", place, f"{way} {which} {s}[{i}]{f' {t}[{j}]' if way == 'swap' else ''} of {place}", change)


def _rename(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """From some operator on, another variable is read."""
    if (got := _some_op(rng, programs[rank])) is None or not got[1].input_arg_names:
        return None
    place, op = got
    name = rng.choice(op.input_arg_names)
    new = _other_name(rng, programs[rank], place.block, name)
    outputs = rng.random() < 0.3

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at:] = [o.renamed({name: new}, outputs) for o in ops[at:]]

    return _on_op("rename", place, f"{name} -> {new} {'read and written' if outputs else 'read'} from {place} on", change)


def _crossed(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """From some operator on, two variables of one type stand for each other."""
    if (got := _some_op(rng, programs[rank])) is None:
        return None
    place, op = got
    names = [*op.input_arg_names, *op.output_arg_names]
    block = programs[rank].blocks[place.block]
    if not names or (mine := block.find(a := rng.choice(names))) is None:
        return None
    same = [n for n in _names(programs[rank]) if n != a and (d := block.find(n)) is not None and d.type == mine.type]
    kin = [n for n in same if (d := block.find(n)) is not None and d.persistable == mine.persistable]
    if not same:
        return None
    b = rng.choice(kin if kin and rng.random() < 0.7 else same)
    many, outputs = rng.choice([1, 1, 3, 10**6]), rng.random() < 0.5

    def change(program: Program, ops: list[Operator], at: int) -> None:
        ops[at : at + many] = [o.renamed({a: b, b: a}, outputs) for o in ops[at : at + many]]

    how = "read and written" if outputs else "read"
    return _on_op("crossed", place, f"{a} and {b} {how} for each other in {many} operators from {place} on", change)


# -- new operators ------------------------------------------------------------------------------------------------------------------


def _insert(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """A plausible operator behind another one; it writes over a variable, or makes a copy that the next reader takes."""
    program = programs[rank]
    if (got := _some_op(rng, program)) is None:
        return None
    place, op = got
    names = [*op.output_arg_names, *op.input_arg_names]
    name = rng.choice(names) if names else rng.choice(_names(program))
    block = program.blocks[place.block]
    desc = block.find(name)
    if desc is None:
        return None
    made = _plausible(rng, programs, rank, block.idx, desc)
    if made is None:
        return None
    type_, ins, outs, attrs = made
    complete = _completed(type_, attrs)
    if complete is None:
        return None
    role = rng.choice([op.role, Role.DIST])
    before = rng.random() < 0.3
    aside = bool(outs) and rng.random() < 0.3
    copy = f"{name}.mutant"
    if aside:
        outs = {slot: tuple(copy if n == name else n for n in values) for slot, values in outs.items()}
    new = Operator(type_, ins, outs, complete, role)
    made_text = f"{', '.join(new.output_arg_names) or '-'} = {type_}({', '.join(new.input_arg_names)}) {attrs or ''}"
    text = f"{made_text} {'before' if before else 'behind'} {place}"

    def change(program: Program, ops: list[Operator], at: int) -> None:
        at = at if before else at + 1
        ops.insert(at, new)
        if aside:
            program.blocks[place.block].descs[copy] = desc._replace(name=copy, persistable=False, is_data=False, is_parameter=False)
            readers = [k for k in range(at + 1, len(ops)) if name in ops[k].input_arg_names]
            if readers:
                ops[readers[0]] = ops[readers[0]].renamed({name: copy})

    return _on_op("insert", place, text, change)


def _plausible(rng: Random, programs: Programs, rank: int, block: int, desc: Var) -> tuple[str, dict, dict, dict] | None:
    program = programs[rank]
    x, n = desc.name, len(programs)
    at = program.blocks[block]
    group = rng.choice([*program.groups, "dp"]) if program.groups else "dp"
    same = [m for m in _names(program) if m != x and (d := at.find(m)) is not None and d.type == desc.type]
    y = rng.choice(same or [x])
    out = {"Out": (x,)}
    two = {"X": (x,), "Y": (y,)}
    ways: list[tuple[str, dict, dict, dict]] = [
        ("scale", {"X": (x,)}, out, {"scale": rng.choice([2.0, 0.5, -1.0, 1.0 / n, float(n), 0.0, 1e-17, 1.001])}),
        ("scale", {"X": (x,)}, out, {"scale": 1.0, "bias": rng.choice([0.0, 1.0, 1e-3, -1.0])}),
        ("sum", {"X": (x, x)}, out, {}),
        ("sum", {"X": (x, y)}, out, {}),
        ("assign", {"X": (y,)}, out, {}),
        ("assign", {"X": (x,)}, out, {}),
        ("elementwise_add", two, out, {}),
        ("elementwise_sub", two, out, {}),
        ("elementwise_mul", two, out, {}),
        ("elementwise_max", two, out, {}),
        ("clip", {"X": (x,)}, out, {"min": -1e3, "max": 1e3}),
        ("abs", {"X": (x,)}, out, {}),
        ("square", {"X": (x,)}, out, {}),
        ("cast", {"X": (x,)}, out, {"dtype": desc.type.dtype}),
        ("fill_zeros_like", {"X": (x,)}, out, {}),
        ("all_reduce", {"X": (x,)}, out, {"group": group, "op": rng.choice(["sum", "avg", "max", "min"])}),
        ("all_reduce", {"X": (x,)}, out, {"group": group, "op": "sum"}),
        ("broadcast", {"X": (x,)}, out, {"group": group, "root": rng.randrange(n)}),
        ("reduce", {"X": (x,)}, out, {"group": group, "op": "sum", "root": rng.randrange(n)}),
        ("barrier", {}, {}, {"group": group}),
        ("nccl_init", {}, {}, {"group": group}),
        ("print", {"X": (x,)}, out, {}),
        ("increment", {"X": (x,)}, out, {}),
        ("dropout", {"X": (x,)}, out, {"dropout_prob": 0.3}),
    ]
    if -1 not in desc.type.shape:
        shape = tuple(desc.type.shape)
        ways += [
            ("fill_constant", {}, out, {"shape": shape, "dtype": desc.type.dtype, "value": rng.choice([0.0, 1.0, 0.1])}),
            ("gaussian_random", {}, out, {"shape": shape, "dtype": desc.type.dtype, "seed": 3}),
            ("reshape", {"X": (x,)}, out, {"shape": shape}),
        ]
    if len(desc.type.shape) == 2:
        ways.append(("transpose", {"X": (x,)}, out, {"axis": (1, 0)}))
    peer = rng.randrange(n)
    known = OPS["recv"].attrs if "recv" in OPS else {}
    sizes = {"shape": tuple(desc.type.shape)} if "shape" in known else {}
    ways += [
        ("send", {"X": (x,)}, {}, {"group": group, "peer": peer}),
        ("recv", {}, out, {"group": group, "peer": peer, **sizes}),
    ]
    type_, ins, outs, attrs = rng.choice(ways)
    if type_ not in OPS:
        return None
    slots = {s.name for s in OPS[type_].in_slots}
    if not set(ins) <= slots:  # the one input under its own name
        if len(ins) != 1 or len(slots) != 1:
            return None
        ins = {next(iter(slots)): next(iter(ins.values()))}
    return type_, ins, outs, {k: v for k, v in attrs.items() if k in OPS[type_].attrs}


def _there_and_back(rng: Random, programs: Programs, rank: int) -> Edit | None:
    """A value is made something else and back again, which loses some of it or nothing."""
    program = programs[rank]
    if (got := _some_op(rng, program)) is None:
        return None
    place, op = got
    names = [*op.output_arg_names, *op.input_arg_names]
    block = program.blocks[place.block]
    if not names or (desc := block.find(x := rng.choice(names))) is None:
        return None
    t, other = desc.type, rng.choice([d for d in DTYPES if d != desc.type.dtype])
    turned = tuple(reversed(range(t.ndim)))
    ways: list[tuple[TensorType, tuple, tuple]] = [
        (t.with_dtype(other), ("cast", {"dtype": other}), ("cast", {"dtype": t.dtype})),
        (t, ("scale", {"scale": 0.5}), ("scale", {"scale": rng.choice([2.0, 1.9])})),
        (t, ("scale", {"scale": -1.0, "bias": 1.0}), ("scale", {"scale": -1.0, "bias": 1.0})),
        (t, ("square", {}), ("sqrt", {})),
        (t, ("exp", {}), ("log", {})),
        (t.with_shape(tuple(t.shape[k] for k in turned)), ("transpose", {"axis": turned}), ("transpose", {"axis": turned})),
    ]
    if -1 not in t.shape:
        flat = t.with_shape((t.numel,))
        ways.append((flat, ("reshape", {"shape": flat.shape}), ("reshape", {"shape": t.shape})))
        if t.ndim == 2:
            ways.append((flat, ("reshape", {"shape": flat.shape}), ("reshape", {"shape": tuple(reversed(t.shape))})))
    between, (go, go_attrs), (back, back_attrs) = rng.choice(ways)
    name = f"{x}.between"
    gone, came = _completed(go, go_attrs), _completed(back, back_attrs)
    if gone is None or came is None:
        return None
    before = rng.random() < 0.3

    def change(program: Program, ops: list[Operator], at: int) -> None:
        placement = desc.placement if between.ndim == t.ndim else ()
        if go == "transpose":
            placement = tuple(Shard(t.ndim - 1 - e.axis, e.group, e.unit) if isinstance(e, Shard) else e for e in placement)
        program.blocks[place.block].descs[name] = Var(name, between, placement, stop_gradient=True)
        at = at if before else at + 1
        ops[at:at] = [
            Operator(go, {"X": (x,)}, {"Out": (name,)}, gone, op.role),
            Operator(back, {"X": (name,)}, {"Out": (x,)}, came, op.role),
        ]

    text = f"{x} = {back}({go}({x})) {go_attrs} {back_attrs} {'before' if before else 'behind'} {place}"
    return _on_op("there and back", place, text, change)


# -- variables ----------------------------------------------------------------------------------------------------------------------


def _variable(rng: Random, programs: Programs, rank: int) -> Edit | None:
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
                attrs[key] = _other_value(rng, program, Place(0, "", (), (), 0), key, attrs[key], len(programs))
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
        field, value = rng.choice(_fields(entry))
        new: Any
        if field == "group":
            new = rng.choice([g for g in (*program.groups, "nope", "nor") if g != value])
        elif field == "op":
            new = rng.choice([o for o in ("sum", "max", "min", "avg", "nope") if o != value])
        elif field == "bounds":
            new = _other_tuple(rng, program, Place(0, "", (), (), 0), "bounds", value, ranks)
        else:
            new = rng.choice([v for v in (value + 1, value - 1, value * 2, -value, 0, 1) if v != value])
        old[k] = _with(entry, field, new)
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


# -- programs as wholes -----------------------------------------------------------------------------------------------------------------


def _groups(rng: Random, programs: Programs, rank: int) -> Edit | None:
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


def _program(rng: Random, programs: Programs, rank: int) -> Edit | None:
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
