"""Run one rank's operators on symbolic values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..opdef import OPS
from ..operator import Operator, Role
from ..program import Program, Var
from ..types import ANY
from .terms import TermError, Terms, Value

_LOCAL_ROLES = (Role.FORWARD, Role.LOSS, Role.BACKWARD, Role.DIST)


def loss_seeds(program: Program) -> set[str]:
    """The variables from which the gradients of the program's losses start."""
    ops = program.global_block().oplist
    losses = {n for op in ops if op.role is Role.LOSS for n in op.output_arg_names}
    starts = (op for op in ops if op.role is Role.BACKWARD and op.type == "fill_constant")
    return {n for op in starts for n in op.output_arg_names if n.partition("@GRAD")[0] in losses}


class State:
    """What the variables of one rank (or of several that are still alike) hold."""

    def __init__(self, terms: Terms, program: Program, rank: int, single: bool = False):
        self.terms = terms
        self.program = program
        self.block = program.global_block()
        self.descs = self.block.descs
        self.rank = rank
        self.single = single  # the program for one device: its own rows are all rows
        self.env: dict[str, Value] = {}
        # on one device a seed counts as it is; ranks weigh it by their rows, with batch_weight
        self.seeds = loss_seeds(program) if single or terms.ranks == 1 else set()

    def fork(self, program: Program, rank: int) -> State:
        new = State(self.terms, program, rank, self.single)
        new.env = dict(self.env)
        return new

    # -- reading and writing ----------------------------------------------------------------------------------------------

    def read(self, name: str) -> Value:
        v = self.env.get(name)
        if v is not None and v[0] != "P":
            return v
        if v is not None:
            return self._joined(name, v)
        d = self.descs.get(name) or self.block.find(name)
        if d is None:
            raise TermError(f"%{name} is not declared")
        if d.attrs and "window_of" in d.attrs:
            return self._window(d)
        if d.is_data:
            # what has no open batch axis is fed whole to every rank
            split = d.placement or (self.single and d.type.shape[:1] == (ANY,))
            v = ("L" if split else "G", self.terms.intern(("input", name)))
        elif d.persistable:
            v = ("G", self._initial(name, d))
        else:
            raise TermError(f"%{name} is used before any operator defines it")
        self.env[name] = v
        return v

    def _initial(self, name: str, d: Var) -> int:
        if "part_of" in d.attrs:
            whole = self.terms.intern(("state", d.attrs["part_of"]))
            size = d.attrs.get("size", 0)
            return self.terms.chunk(whole, d.attrs["start"], d.attrs["stop"], size) if size else whole
        return self.terms.intern(("state", name))

    def _window(self, d: Var) -> Value:
        whole, start, stop = d.attrs["window_of"], d.attrs["start"], d.attrs["stop"]
        held = self.env.get(whole)
        size = self.descs[whole].type.numel
        if held is not None and held[0] == "P":
            if (start, stop) in held[2]:
                return held[2][start, stop]
            return self.terms.chunked(held[1], start, stop, size)
        return self.terms.chunked(self.read(whole), start, stop, size)

    def _joined(self, name: str, v: Value) -> Value:
        """A parameter whose chunks were written one by one: whole again once every chunk is the same update's."""
        size = self.descs[name].type.numel
        kinds = {p[0] for p in v[2].values()}
        if kinds == {"G"}:
            e = self.terms.join([(a, b, p[1]) for (a, b), p in v[2].items()], size)
            if e is not None:
                self.env[name] = ("G", e)
                return self.env[name]
        return v

    def write(self, name: str, value: Value) -> None:
        d = self.descs.get(name)
        if d is not None and d.attrs and "window_of" in d.attrs:
            whole = d.attrs["window_of"]
            held = self.env.get(whole)
            # a chunk that is written again begins a new round of updates
            if held is None or held[0] != "P":
                held = ("P", self.read(whole), {})
            self.env[whole] = ("P", held[1], {**held[2], (d.attrs["start"], d.attrs["stop"]): value})
            return
        self.env[name] = value

    # -- operators ---------------------------------------------------------------------------------------------------------

    def run(self, op: Operator) -> None:
        """Evaluate one operator that does not communicate. Raises TermError where the result would be wrong."""
        rule = _RULES.get(op.type)
        if rule is not None:
            rule(self, op)
            return
        names = op.input_arg_names
        ins = [self.read(n) for n in names]
        for n, v in zip(names, ins, strict=True):
            if v[0] in ("S", "P", "U", "T"):
                raise TermError(f"op {op.type} reads %{n}, which is {self.terms.describe(v)}")
        if op.role not in _LOCAL_ROLES:
            ins = [self._whole(op, n, v) for n, v in zip(names, ins, strict=True)]
        if op.attrs.get("sharded") is False and not op.attrs.get("is_test") and not self.single and self.terms.ranks > 1:
            local = next((n for n, v in zip(names, ins, strict=True) if v[0] == "L"), None)
            if local is not None:
                raise TermError(
                    f"op {op.type} draws the same numbers on every rank for %{local}, which is of the rank's own rows; "
                    "sharded=true is missing"
                )
        definition = OPS[op.type]
        small = [self._small(n) for n in names]
        slots = tuple((s, len(a)) for s, a in op.inputs.items())
        attrs = self._attrs(op)
        for k, n in enumerate(op.output_arg_names):
            self.write(n, self.terms.apply(op.type, attrs, tuple(ins), slots, k, definition.elementwise, small))

    def _whole(self, op: Operator, name: str, v: Value) -> Value:
        if v[0] == "L":
            if self.single or self.terms.ranks == 1:  # its own rows are all rows
                return ("G", v[1])
            raise TermError(
                f"op {op.type} updates from %{name}, which is of the rank's own rows only; all_reduce, reduce or ring_reduce it first"
            )
        return v

    def _small(self, name: str) -> bool:
        d = self.descs.get(name) or self.block.find(name)
        return d is not None and d.type.numel == 1

    def _attrs(self, op: Operator) -> tuple:
        if not op.sub_blocks():
            return tuple(sorted((k, v) for k, v in op.attrs.items() if k != "sharded"))
        bodies = tuple(tuple(o.key() for o in self.program.blocks[b].oplist) for b in op.sub_blocks())
        rest = tuple(sorted((k, v) for k, v in op.attrs.items() if not hasattr(v, "idx")))
        return (*rest, ("bodies", bodies))


def _sum(s: State, op: Operator) -> None:
    values = [s.read(n) for n in op.input_arg_names]
    _linear(s, op, [(v, 1.0) for v in values])


def _scale(s: State, op: Operator) -> None:
    v = s.read(op.input_arg_names[0])
    if op.attrs.get("bias", 0.0) != 0.0:
        if v[0] in ("S", "P", "U", "T"):
            raise TermError(f"op scale adds a bias to %{op.input_arg_names[0]}, which is {s.terms.describe(v)}")
        value = s.terms.apply(op.type, s._attrs(op), (v,), (("X", 1),), 0, True, [s._small(op.input_arg_names[0])])
        s.write(op.output_arg_names[0], value)
        return
    _linear(s, op, [(v, op.attrs.get("scale", 1.0))])


def _pack(s: State, op: Operator) -> None:
    sizes = tuple(s.descs[n].type.numel for n in op.input_arg_names)
    s.write(op.output_arg_names[0], ("T", tuple(s.read(n) for n in op.input_arg_names), sizes))


def _unpack(s: State, op: Operator) -> None:
    v = s.read(op.input_arg_names[0])
    names = op.output_arg_names
    if v[0] != "T" or v[2] != tuple(s.descs[n].type.numel for n in names):
        raise TermError(f"op unpack takes %{op.input_arg_names[0]} apart, which was not packed from parts of these sizes")
    for n, part in zip(names, v[1], strict=True):
        s.write(n, part)


def _linear(s: State, op: Operator, weighted: list[tuple[Value, float]]) -> None:
    out = op.output_arg_names[0]
    packed = [v for v, _ in weighted if v[0] == "T"]
    if packed:
        if len(packed) < len(weighted) or len({v[2] for v in packed}) > 1:
            raise TermError(f"op {op.type} joins values that were packed differently")
        parts = []
        for column in zip(*(v[1] for v, _ in weighted), strict=True):
            terms = [(atom, w * f) for v, (_, f) in zip(column, weighted, strict=True) for atom, w in s.terms.of(v, s.rank)]
            parts.append(s.terms.total(terms))
        s.write(out, ("T", tuple(parts), packed[0][2]))
        return
    if op.role not in _LOCAL_ROLES:
        weighted = [(s._whole(op, n, v), w) for n, (v, w) in zip(op.input_arg_names, weighted, strict=True)]
    for n, (v, _) in zip(op.input_arg_names, weighted, strict=True):
        if v[0] in ("P", "U"):
            raise TermError(f"op {op.type} reads %{n}, which is {s.terms.describe(v)}")
    kinds = {v[0] for v, _ in weighted}
    if kinds <= {"G"} or kinds == {"L"} or (kinds == {"G", "L"} and op.role is not Role.DIST):
        if kinds == {"G", "L"}:  # a rank's own value plus a shared one: an ordinary operator
            if op.role is Role.BACKWARD and s.terms.combine == "sum" and not s.single and s.terms.ranks > 1:
                raise TermError(
                    f"op {op.type} adds a gradient that is the same on every rank to a term of the rank's own rows; "
                    "the sum over the ranks would count it once per rank"
                )
            ins = tuple(v for v, _ in weighted)
            s.write(out, s.terms.apply(op.type, s._attrs(op), ins, (), 0, False, [False] * len(ins)))
            return
        s.write(out, (kinds.pop(), s.terms.lin((v[1], w) for v, w in weighted)))
        return
    s.write(out, s.terms.total((atom, w * f) for v, f in weighted for atom, w in s.terms.of(v, s.rank)))


def _pass_through(s: State, op: Operator) -> None:
    v = s.read(op.input_arg_names[0])
    if v[0] in ("P", "U"):
        raise TermError(f"op {op.type} reads %{op.input_arg_names[0]}, which is {s.terms.describe(v)}")
    s.write(op.output_arg_names[0], v)


def _chunk(s: State, op: Operator) -> None:
    name = op.input_arg_names[0]
    d = s.descs.get(name) or s.block.find(name)
    assert d is not None
    s.write(op.output_arg_names[0], s.terms.chunked(s.read(name), op.attrs["start"], op.attrs["stop"], d.type.numel))


def _constant(s: State, op: Operator) -> None:
    # a constant of any shape: shapes are compared elsewhere
    out = op.output_arg_names[0]
    e = s.terms.intern(("const", float(op.attrs["value"])))
    s.write(out, ("G", s.terms.intern(("seed", e)) if out in s.seeds else e))


def _batch_weight(s: State, op: Operator) -> None:
    x = op.input_arg_names[0]
    v = s.read(x)
    if v[0] != "G" or s.terms.keys[v[1]][0] != "const":
        raise TermError(f"op batch_weight weighs %{x}; only the seed of a loss's gradient may be weighed, and once")
    if op.attrs["op"] != s.terms.combine:
        raise TermError(f"op batch_weight has op={op.attrs['op']!r}, but the ranks' losses combine by {s.terms.combine!r}")
    s.write(op.output_arg_names[0], ("G", s.terms.intern(("seed", v[1]))))


_RULES: dict[str, Callable[[State, Any], None]] = {
    "sum": _sum,
    "scale": _scale,
    "assign": _pass_through,
    "batch_weight": _batch_weight,
    "chunk": _chunk,
    "pack": _pack,
    "unpack": _unpack,
    "fill_constant": _constant,
}
