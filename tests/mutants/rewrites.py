"""Right ways to write the communication of data_parallel otherwise, by hand: the proof must accept every one.

Each rewrite takes the rank programs and gives others (None where it has nothing to do). The ranks' programs are rewritten alike, or as
the algorithm says for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from random import Random
from typing import Any

from fluidx.ir import OPS, REPLICATE, Local, Operator, Placement, Program, Role, Shard, TensorType

from .mutators.edit import changed_copy

Rewrite = Callable[[Random, Sequence[Program]], list[Program] | None]
REWRITES: dict[str, Rewrite] = {}


class Pen:
    """Writes one rank's new list of operators."""

    def __init__(self, program: Program):
        self.program = changed_copy(program)
        self.block = self.program.blocks[0]
        self.old = list(self.block.oplist)
        self.new = self.block.oplist = []
        self.rank = program.rank or 0
        (self.members,) = [s for s in program.groups["dp"] if self.rank in s]
        self.n, self.index = len(self.members), self.members.index(self.rank)

    def declare(self, name: str, type: TensorType, placement: Placement = REPLICATE) -> str:
        like = next(iter(self.block.descs.values()))
        self.block.descs[name] = like._replace(
            name=name, type=type, placement=placement, persistable=False, is_data=False, is_parameter=False, stop_gradient=True, attrs={}
        )
        return name

    def emit(self, type: str, ins: dict[str, Any], outs: dict[str, Any], role: Role = Role.DIST, **attrs: Any) -> None:

        def slots(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
            return {k: tuple(v) if isinstance(v, (list, tuple)) else (v,) for k, v in given.items()}

        self.new.append(Operator(type, slots(ins), slots(outs), OPS[type].complete_attrs(attrs), role))

    def type(self, name: str) -> TensorType:
        return self.block.desc(name).type

    def placement(self, name: str) -> Placement:
        return self.block.desc(name).placement


def _reductions(program: Program) -> list[Operator]:
    """The all_reduces of gradients: what the strategy wrote, not what the model needs on the way."""
    found = [
        op
        for op in program.blocks[0].oplist
        if op.type == "all_reduce" and op.attrs["group"] == "dp" and op.role is Role.DIST and op.attrs["op"] == "sum"
    ]
    block = program.blocks[0]
    return [op for op in found if -1 not in block.desc(op.input("X")[0]).type.shape and block.desc(op.input("X")[0]).type.is_float]


def rewrite(write: Rewrite) -> Rewrite:
    REWRITES[write.__name__] = write
    return write


def _each(change: Callable[[Pen, Operator], bool | None]) -> Rewrite:
    """Every gradient's all_reduce written otherwise; `change` gives False to leave it."""

    def run(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
        if not all(_reductions(m) for m in mains) or any(len(m.groups["dp"]) != 1 for m in mains):
            return None
        out, changed = [], False
        for m in mains:
            pen, wanted = Pen(m), {id(op) for op in _reductions(m)}
            for op in pen.old:
                if id(op) in wanted and change(pen, op) is not False:
                    changed = True
                else:
                    pen.new.append(op)
            out.append(pen.program)
        return out if changed else None

    return run


def _ends(pen: Pen, op: Operator) -> tuple[str, str, TensorType, Placement, str]:
    x, out = op.input("X")[0], op.output("Out")[0]
    return x, out, pen.type(out), pen.placement(x), op.attrs["op"]


# -- one value otherwise ------------------------------------------------------------------------------------------------------------


@rewrite
def split(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """reduce_scatter and all_gather."""

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, _, how = _ends(pen, op)
        part = pen.declare(f"{out}.shard", t, (Shard(0, "dp"),))
        pen.emit("reduce_scatter", {"X": x}, {"Out": part}, group="dp", op=how)
        pen.emit("all_gather", {"X": part}, {"Out": out}, group="dp")

    return _each(change)(rng, mains)


@rewrite
def split_flat(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """The same behind a reshape to one axis, and back."""

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, place, how = _ends(pen, op)
        flat = t.with_shape((prod(t.shape),))
        long = pen.declare(f"{out}.flat", flat, place)
        part = pen.declare(f"{out}.shard", flat, (Shard(0, "dp"),))
        whole = pen.declare(f"{out}.whole", flat)
        pen.emit("reshape", {"X": x}, {"Out": long}, shape=flat.shape)
        pen.emit("reduce_scatter", {"X": long}, {"Out": part}, group="dp", op=how)
        pen.emit("all_gather", {"X": part}, {"Out": whole}, group="dp")
        pen.emit("reshape", {"X": whole}, {"Out": out}, shape=t.shape)

    return _each(change)(rng, mains)


def _scaled(before: float, after: float, by_division: bool) -> Callable[[Pen, Operator], None]:
    def change(pen: Pen, op: Operator) -> None:
        x, out, t, place, how = _ends(pen, op)
        less, more = pen.declare(f"{out}.less", t, place), pen.declare(f"{out}.more", t)
        if by_division:
            two = pen.declare(f"{out}.by", TensorType(t.dtype, (1,)))
            pen.emit("fill_constant", {}, {"Out": two}, shape=(1,), dtype=t.dtype, value=1 / before)
            pen.emit("elementwise_div", {"X": x, "Y": two}, {"Out": less})
        else:
            pen.emit("scale", {"X": x}, {"Out": less}, scale=before)
        pen.emit("all_reduce", {"X": less}, {"Out": more}, group="dp", op=how)
        pen.emit("scale", {"X": more}, {"Out": out}, scale=after)

    return change


@rewrite
def scaled(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Scaled before and back behind."""
    before = rng.choice([0.5, 0.25, 4.0, 2.0**-53])
    return _each(_scaled(before, 1 / before, False))(rng, mains)


@rewrite
def divided(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """elementwise_div by a constant instead of scale."""
    return _each(_scaled(0.5, 2.0, True))(rng, mains)


@rewrite
def half_of_the_double(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """The sum added to itself and halved."""

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, _, how = _ends(pen, op)
        total, double = pen.declare(f"{out}.total", t), pen.declare(f"{out}.double", t)
        pen.emit("all_reduce", {"X": x}, {"Out": total}, group="dp", op=how)
        pen.emit("sum", {"X": [total, total]}, {"Out": double})
        pen.emit("scale", {"X": double}, {"Out": out}, scale=0.5)

    return _each(change)(rng, mains)


@rewrite
def reduce_then_broadcast(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    def change(pen: Pen, op: Operator) -> None:
        x, out, t, _, how = _ends(pen, op)
        from fluidx.ir import At

        root = len(out) % pen.n
        there = pen.declare(f"{out}.root", t, (At(root, "dp"),))
        pen.emit("reduce", {"X": x}, {"Out": there}, group="dp", op=how, root=root)
        pen.emit("broadcast", {"X": there}, {"Out": out}, group="dp", root=root)

    return _each(change)(rng, mains)


@rewrite
def rows_apart(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """The first rows and the others reduced apart: slice, slice, all_reduce twice, concat."""

    def change(pen: Pen, op: Operator) -> bool | None:
        x, out, t, place, how = _ends(pen, op)
        rows = t.shape[0]
        if rows < 2:
            return False
        at, halves = (rows + 1) // 2, []
        for k, (a, b) in enumerate(((0, at), (at, rows))):
            half = t.with_shape((b - a, *t.shape[1:]))
            mine, whole = pen.declare(f"{out}.mine{k}", half, place), pen.declare(f"{out}.half{k}", half)
            pen.emit("slice", {"Input": x}, {"Out": mine}, axes=(0,), starts=(a,), ends=(b,))
            pen.emit("all_reduce", {"X": mine}, {"Out": whole}, group="dp", op=how)
            halves.append(whole)
        pen.emit("concat", {"X": halves}, {"Out": out}, axis=0)
        return None

    return _each(change)(rng, mains)


@rewrite
def chunks_apart(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Flat chunks reduced apart, joined and given their shape again."""

    def change(pen: Pen, op: Operator) -> bool | None:
        x, out, t, place, how = _ends(pen, op)
        size = prod(t.shape)
        if size < 3:
            return False
        at, parts = size // 3 + 1, []
        for k, (a, b) in enumerate(((0, at), (at, size))):
            half = t.with_shape((b - a,))
            mine, whole = pen.declare(f"{out}.mine{k}", half, place), pen.declare(f"{out}.half{k}", half)
            pen.emit("chunk", {"X": x}, {"Out": mine}, start=a, stop=b)
            pen.emit("all_reduce", {"X": mine}, {"Out": whole}, group="dp", op=how)
            parts.append(whole)
        joined = pen.declare(f"{out}.joined", t.with_shape((size,)))
        pen.emit("concat", {"X": parts}, {"Out": joined}, axis=0)
        pen.emit("reshape", {"X": joined}, {"Out": out}, shape=t.shape)
        return None

    return _each(change)(rng, mains)


@rewrite
def copied_and_in_place(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """A copy is reduced in place, a barrier stands in between."""

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, place, how = _ends(pen, op)
        mine, whole = pen.declare(f"{out}.mine", t, place), pen.declare(f"{out}.copy", t)
        pen.emit("assign", {"X": x}, {"Out": mine})
        pen.emit("barrier", {}, {}, group="dp")
        pen.emit("all_reduce", {"X": mine}, {"Out": whole}, group="dp", op=how)
        pen.emit("assign", {"X": whole}, {"Out": out})

    return _each(change)(rng, mains)


@rewrite
def recursive_doubling(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """log2(n) exchanges with partners at distance 1, 2, 4 ..., by send, recv and sum."""
    n = len(mains)
    if n & (n - 1):
        return None

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, _, _ = _ends(pen, op)
        distance, held = 1, x
        while distance < pen.n:
            peer = pen.members[pen.index ^ distance]
            come = pen.declare(f"{out}.in{distance}", t, (Local("dp"),))
            total = pen.declare(f"{out}.of{2 * distance}", t, (Local("dp"),))
            batch = f"{out}.hop{distance}"
            pen.emit("send", {"X": held}, {}, group="dp", peer=peer, batch=batch)
            pen.emit("recv", {}, {"Out": come}, group="dp", peer=peer, batch=batch, shape=t.shape, dtype=t.dtype)
            pen.emit("sum", {"X": [held, come] if pen.index & distance else [come, held]}, {"Out": total})
            held, distance = total, 2 * distance
        pen.emit("assign", {"X": held}, {"Out": out})

    return _each(change)(rng, mains)


@rewrite
def ring_by_hand(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Round the ring from rank 1 on, a partial sum added at each hop, and the whole sum handed on."""

    def change(pen: Pen, op: Operator) -> None:
        x, out, t, _, _ = _ends(pen, op)
        n, k = pen.n, (pen.index - 1) % pen.n  # hops from the first
        left, right = pen.members[(pen.index - 1) % n], pen.members[(pen.index + 1) % n]
        held = x
        if k:
            come, held = pen.declare(f"{out}.in", t, (Local("dp"),)), pen.declare(f"{out}.part", t, (Local("dp"),))
            pen.emit("recv", {}, {"Out": come}, group="dp", peer=left, shape=t.shape, dtype=t.dtype)
            pen.emit("sum", {"X": [come, x]}, {"Out": held})
        if k < n - 1:
            pen.emit("send", {"X": held}, {}, group="dp", peer=right)
            held = pen.declare(f"{out}.total", t, (Local("dp"),))
            pen.emit("recv", {}, {"Out": held}, group="dp", peer=left, shape=t.shape, dtype=t.dtype)
        if k != n - 2:
            pen.emit("send", {"X": held}, {}, group="dp", peer=right)
        pen.emit("assign", {"X": held}, {"Out": out})

    return _each(change)(rng, mains)


# -- several values -----------------------------------------------------------------------------------------------------------------


@rewrite
def bucket(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """All gradients in one message: pack, all_reduce, unpack."""
    return _buckets(mains, 10**6)


@rewrite
def buckets_of_two(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    return _buckets(mains, 2)


def _buckets(mains: Sequence[Program], size: int) -> list[Program] | None:
    out = []
    for m in mains:
        reductions = _reductions(m)
        if len({op.attrs["op"] for op in reductions}) != 1 or len(reductions) < 2:
            return None
        pen, wanted, waiting = Pen(m), {id(op) for op in reductions}, []
        if len({pen.type(op.input("X")[0]).dtype for op in reductions}) > 1 or _read_early(pen.old, wanted):
            return None

        def flush(pen: Pen, ops: list[Operator], k: int) -> None:
            xs, outs = [op.input("X")[0] for op in ops], [op.output("Out")[0] for op in ops]
            flat = TensorType(pen.type(xs[0]).dtype, (sum(prod(pen.type(x).shape) for x in xs),))
            mine, whole = pen.declare(f"bucket{k}", flat, pen.placement(xs[0])), pen.declare(f"bucket{k}.sum", flat)
            pen.emit("pack", {"X": xs}, {"Out": mine})
            pen.emit("all_reduce", {"X": mine}, {"Out": whole}, group="dp", op=ops[0].attrs["op"])
            pen.emit("unpack", {"X": whole}, {"Out": outs}, shapes=tuple(tuple(pen.type(o).shape) for o in outs))

        k = 0
        left = len(reductions)
        for op in pen.old:
            if id(op) not in wanted:
                pen.new.append(op)
                continue
            waiting.append(op)
            left -= 1
            if len(waiting) == size or not left:
                flush(pen, waiting, k)
                waiting, k = [], k + 1
        out.append(pen.program)
    return out


def _read_early(ops: Sequence[Operator], wanted: set[int]) -> bool:
    """Is a reduced value read, or a gradient written again, before the last reduction?"""
    last = max(k for k, op in enumerate(ops) if id(op) in wanted)
    made: set[str] = set()
    for op in ops[:last]:
        if made & {*op.input_arg_names, *op.output_arg_names}:
            return True
        if id(op) in wanted:
            made |= {*op.input_arg_names, *op.output_arg_names}
    return False


@rewrite
def reduced_late(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """All reductions of gradients just before the first reader of one."""
    return _later(mains, None)


@rewrite
def reduced_late_in_another_order(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    return _later(mains, rng.randrange(10**6))


def _later(mains: Sequence[Program], seed: int | None) -> list[Program] | None:
    out = []
    for m in mains:
        reductions = _reductions(m)
        pen, wanted = Pen(m), {id(op) for op in reductions}
        if len(reductions) < 2 or _read_early(pen.old, wanted):
            return None
        order = list(reductions)
        if seed is not None:
            Random(seed).shuffle(order)
        last = max(k for k, op in enumerate(pen.old) if id(op) in wanted)
        for k, op in enumerate(pen.old):
            if id(op) not in wanted:
                pen.new.append(op)
            if k == last:
                pen.new.extend(order)
        out.append(pen.program)
    return out


@rewrite
def zero_by_hand(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Each rank updates its rows of every parameter: reduce_scatter, part, sgd, all_gather."""
    out, changed = [], False
    for m in mains:
        if any(len(s) != len(mains) for s in m.groups["dp"]):
            return None
        pen = Pen(m)
        sums = {op.output("Out")[0]: op for op in _reductions(m)}
        readers: dict[str, int] = {}
        for op in pen.old:
            for x in op.input_arg_names:
                readers[x] = readers.get(x, 0) + 1
        cut = {
            op.input("Grad")[0]: op
            for op in pen.old
            if op.type == "sgd" and op.input("Grad")[0] in sums and readers[op.input("Grad")[0]] == 1
        }
        for op in pen.old:
            grad = op.output("Out")[0] if op.type == "all_reduce" else op.input("Grad")[0] if op.type == "sgd" else ""
            if grad not in cut or (op.type == "sgd" and cut[grad] is not op):
                pen.new.append(op)
                continue
            t, shard = pen.type(grad), (Shard(0, "dp"),)
            if op.type == "all_reduce":
                mine = pen.declare(f"{grad}.shard", t, shard)
                pen.emit("reduce_scatter", {"X": op.input("X")[0]}, {"Out": mine}, group="dp", op=op.attrs["op"])
                continue
            p, changed = op.input("Param")[0], True
            old, new = pen.declare(f"{p}.old", t, shard), pen.declare(f"{p}.new", t, shard)
            pen.emit("part", {"X": p}, {"Out": old}, Role.OPTIMIZE, group="dp", axis=0)
            rate = op.input("LearningRate")[0]
            pen.emit("sgd", {"Param": old, "Grad": f"{grad}.shard", "LearningRate": rate}, {"ParamOut": new}, Role.OPTIMIZE)
            pen.emit("all_gather", {"X": new}, {"Out": p}, group="dp")
        out.append(pen.program)
    return out if changed else None


@rewrite
def as_text(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Nothing but printed and read back."""
    return [Program.parse_from_string(str(m)) for m in mains]


@rewrite
def dead_operators(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Operators whose results nobody reads, here and there, on some ranks only."""
    out = []
    for m in mains:
        pen = Pen(m)
        for k, op in enumerate(pen.old):
            pen.new.append(op)
            if op.output_arg_names and rng.random() < 0.2:
                x = op.output_arg_names[0]
                name = f"dead{k}.of{pen.rank}"  # one name is one type and placement on all ranks that know it
                d = pen.block.desc(x)._replace(name=name, persistable=False, is_parameter=False, is_data=False, attrs={})
                pen.block.descs[name] = d
                pen.emit("assign", {"X": x}, {"Out": name}, op.role)
        out.append(pen.program)
    return out


@rewrite
def neighbours_exchanged(rng: Random, mains: Sequence[Program]) -> list[Program] | None:
    """Operators that do not depend on each other change places, alike on all ranks; communication keeps its order."""
    first = mains[0].blocks[0].oplist
    if any(len(m.blocks[0].oplist) != len(first) for m in mains):
        return None
    moves = [rng.randrange(max(1, len(first) - 1)) for _ in range(20)]
    out = []
    for m in mains:
        new = changed_copy(m)
        ops = new.blocks[0].oplist
        for k in moves:
            if k + 1 < len(ops) and _independent(ops[k], ops[k + 1]):
                ops[k], ops[k + 1] = ops[k + 1], ops[k]
        out.append(new)
    return out


def _independent(a: Operator, b: Operator) -> bool:
    talks = [op for op in (a, b) if "group" in op.attrs]
    if len(talks) == 2 or a.sub_blocks() or b.sub_blocks():
        return False
    if any(OPS[op.type].effect.value in ("host", "random") for op in (a, b)):
        return False
    reads, writes = {*a.input_arg_names}, {*a.output_arg_names}
    return not (writes & {*b.input_arg_names, *b.output_arg_names} or reads & {*b.output_arg_names})


# -- startup ------------------------------------------------------------------------------------------------------------------------

STARTUPS: dict[str, Rewrite] = {}


def startup(write: Rewrite) -> Rewrite:
    STARTUPS[write.__name__] = write
    return write


@startup
def broadcast_by_sends(rng: Random, startups: Sequence[Program]) -> list[Program] | None:
    """Every broadcast as a chain of sends from rank to rank."""
    out, changed = [], False
    for s in startups:
        if len(s.groups.get("dp", ())) != 1 or len(s.groups["dp"][0]) != len(startups):
            return None
        pen = Pen(s)
        for op in pen.old:
            if op.type != "broadcast" or op.attrs["group"] != "dp" or op.input("X") != op.output("Out"):
                pen.new.append(op)
                continue
            changed = True
            (x,), root = op.input("X"), op.attrs["root"]
            t, k = pen.type(x), (pen.index - root) % pen.n
            if k:
                pen.emit("recv", {}, {"Out": x}, group="dp", peer=pen.members[pen.index - 1], shape=t.shape, dtype=t.dtype)
            if k < pen.n - 1:
                pen.emit("send", {"X": x}, {}, group="dp", peer=pen.members[(pen.index + 1) % pen.n])
        out.append(pen.program)
    return out if changed else None


@startup
def no_broadcasts(rng: Random, startups: Sequence[Program]) -> list[Program] | None:
    """Every rank draws the same numbers, so nothing need be sent; a constant even less."""
    out, changed = [], False
    for s in startups:
        new = changed_copy(s)
        ops = new.blocks[0].oplist
        kept = [op for op in ops if op.type != "broadcast" or op.input("X") != op.output("Out")]
        changed |= len(kept) != len(ops)
        made = {n for op in kept for n in op.output_arg_names}
        if any(op.input("X")[0] not in made for op in ops if op.type == "broadcast"):
            return None
        new.blocks[0].oplist = kept
        out.append(new)
    return out if changed else None


@startup
def broadcasts_last(rng: Random, startups: Sequence[Program]) -> list[Program] | None:
    out = []
    for s in startups:
        new = changed_copy(s)
        ops = new.blocks[0].oplist
        late = [op for op in ops if op.type == "broadcast" and op.input("X") == op.output("Out")]
        if not late or {n for op in late for n in op.input_arg_names} & {
            n for op in ops if op not in late and not OPS[op.type].effect.value == "random" for n in op.input_arg_names
        }:
            return None
        new.blocks[0].oplist = [op for op in ops if op not in late] + late
        out.append(new)
    return out
