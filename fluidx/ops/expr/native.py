"""Scalar expressions on the vector machine of `fluidx.native`: one call computes several outputs in one pass over memory.

`bind_native` gives the call, or None for what the machine lacks: other dtypes than float32, float64 and bool, powers, remainders, sine,
cosine, and operands that need more than three loops. Sums, products, quotients, roots, extrema and comparisons have the bits that NumPy
gives in the same order of operations; exp, log, tanh, erf and their kin are within two units in the last place of the true value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ... import native
from .nodes import BOOLEAN, COMPARE, Expr, nodes, symbols

_UNARY = {"neg", "abs", "sqrt", "rsqrt", "exp", "log", "log1p", "tanh", "sigmoid", "softplus", "erf", "sign", "floor", "ceil", "round"}
_COMMUTING, _ORDERED = {"add", "mul"}, {"sub", "div", "min", "max"}
_MIRROR = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}
_TESTS, _MASKS = {"isnan", "isinf", "isfinite"}, {"and", "or", "xor"}
_KNOWN = {*_UNARY, *_COMMUTING, *_ORDERED, *COMPARE, *_TESTS, *_MASKS, "not", "where", "const", "sym"}

# Rough picoseconds an element in float32 with AVX-512, on which the size of a thread's share hangs; nothing else does.
_COST = {
    "exp": 300, "log": 400, "log1p": 500, "tanh": 400, "sigmoid": 450, "softplus": 800, "erf": 450,
    "div": 150, "sqrt": 150, "rsqrt": 250,
}  # fmt: skip


def bind_native(
    outs: Sequence[Expr], values: Mapping[str, np.ndarray], arrays_out: Sequence[np.ndarray], dry: bool = False
) -> native.Call | None:
    """The call that computes `outs` from the arrays in `values` into `arrays_out`, or None where something is not covered.

    The outputs share one shape, to which the inputs broadcast. An output may be one of the inputs, at the same address and with the
    same strides; any other overlap is not covered. `dry`: the arrays have shapes and strides and share some memory; all that counts is
    whether there is a call.
    """
    names = list(dict.fromkeys(n for e in outs for n in symbols(e)))
    ins = [values[n] for n in names]
    arrays = [*ins, *arrays_out]
    shape = arrays_out[0].shape
    floats = {a.dtype for a in arrays if a.dtype != bool}
    if len(floats) != 1 or (dtype := floats.pop().name) not in ("float32", "float64") or any(o.shape != shape for o in arrays_out):
        return None
    loops = _loops(shape, arrays, arrays_out[0])
    aliases = () if dry else _aliases(ins, arrays_out)
    if loops is None or aliases is None:
        return None
    sizes, strides = loops
    kinds = tuple(_kind(a, s[2]) for a, s in zip(arrays, strides, strict=True))
    scalars = frozenset(n for n, kind in zip(names, kinds, strict=False) if kind.endswith("scalar"))
    packed = _packed(sizes, arrays, strides, kinds, len(ins), _works_by_row(tuple(outs), scalars))
    kinds = packed or kinds
    code = _assemble(tuple(outs), tuple(names), kinds, aliases)
    if code is None:
        return None
    operands = [w for a, s in zip(arrays, strides, strict=True) for w in (native.address(a), *s)]
    cost = code.cost if dtype == "float32" else 2 * code.cost
    counts = (len(arrays), len(code.constants), code.scalars, code.vectors, len(code.first), len(code.second))
    words = (*sizes, int(packed is not None), cost, *counts, *operands, *code.constants, *code.first, *code.second)
    return native.Call("vm_f32" if dtype == "float32" else "vm_f64", words, tuple(arrays))


# -- from arrays to three loops ------------------------------------------------------------------------------------------------------


def _loops(shape: tuple[int, ...], arrays: Sequence[np.ndarray], lead: np.ndarray) -> tuple[Any, list[tuple[int, ...]]] | None:
    """Sizes of three loops and each array's strides in them, in bytes; axes that every array walks evenly are joined."""
    try:
        full = [np.broadcast_to(a, shape).strides for a in arrays]
    except ValueError:
        return None
    axes = sorted((i for i, n in enumerate(shape) if n != 1), key=lambda i: -abs(lead.strides[i]))
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in arrays]
    for i in axes:
        if sizes and all(s[-1] == f[i] * shape[i] for s, f in zip(strides, full, strict=True)):
            sizes[-1] *= shape[i]
            for s, f in zip(strides, full, strict=True):
                s[-1] = f[i]
        else:
            sizes.append(shape[i])
            for s, f in zip(strides, full, strict=True):
                s.append(f[i])
    if len(sizes) > 3:
        return None
    missing = 3 - len(sizes)
    return (*[1] * missing, *sizes), [(*[0] * missing, *s) for s in strides]


def _aliases(ins: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> tuple[tuple[int, int], ...] | None:
    """(input, output) pairs that are the same memory, or None where two arrays overlap in another way."""
    pairs = []
    for k, o in enumerate(outs):
        for i, a in enumerate(ins):
            if np.may_share_memory(a, o):
                if a.dtype != o.dtype or native.address(a) != native.address(o):
                    return None
                if o.size > 1 and (a.shape, a.strides) != (o.shape, o.strides):
                    return None
                pairs.append((i, k))
        if any(np.may_share_memory(o, other) for other in outs[:k]):
            return None
    return tuple(pairs)


def _kind(a: np.ndarray, stride: int) -> str:
    """How a register reaches an array: scalar (the same along a row), vector (in place) or strided; `?` in front for bool."""
    bare = "scalar" if stride == 0 else "vector" if stride == a.itemsize else "strided"
    return "?" + bare if a.dtype == bool else bare


@lru_cache(maxsize=1024)
def _works_by_row(outs: tuple[Expr, ...], scalars: frozenset[str]) -> bool:
    """Whether some function has scalars alone as arguments."""
    return any(n.fn not in ("const", "sym") and scalars.issuperset(symbols(n)) for e in outs for n in nodes(e))


def _packed(sizes: Any, arrays: Sequence[np.ndarray], strides: Any, kinds: Sequence[str], inputs: int, work: bool) -> Any:
    """The kinds of a program that works on several rows at a time, or None where rows are long enough, or an array forbids it.

    Then a scalar of each row is spread out like a vector, and `work` on scalars alone is done for every element.
    """
    _, rows, columns = sizes
    by_row = work and any(kind == "scalar" and s[1] for kind, s in zip(kinds, strides, strict=True))
    if rows < 2 or not 0 < columns < (32 if by_row else 256):
        return None
    made = []
    for i, (a, s, kind) in enumerate(zip(arrays, strides, kinds, strict=True)):
        even = s[1] == columns * s[2]
        if not even and (i >= inputs or a.dtype == bool):
            return None
        made.append(kind if even else "vector")
    return tuple(made)


# -- from expressions to instructions ------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A value of the program: where it lies, whether it is the same along a row, and whether it is a mask."""

    where: tuple[str, int]  # ("in", operand), ("const", number) or ("made", number of the instruction)
    scalar: bool
    mask: bool


class _Code(NamedTuple):
    constants: tuple[float, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    scalars: int
    vectors: int
    cost: int


class _Instruction(NamedTuple):
    op: str
    args: tuple[_Value, ...]
    value: _Value


@lru_cache(maxsize=1)
def _opcodes() -> dict[str, int]:
    return {name: i for i, name in enumerate(native.opcodes())}


@lru_cache(maxsize=1024)
def _assemble(outs: tuple[Expr, ...], names: tuple[str, ...], kinds: tuple[str, ...], aliases: tuple[tuple[int, int], ...]) -> _Code | None:
    order = list(dict.fromkeys(n for e in outs for n in nodes(e)))
    if any(n.fn not in _KNOWN for n in order):
        return None
    a = _Assembler(outs, order, names, kinds)
    targets = [a.result(e, kinds[len(names) + k]) for k, e in enumerate(outs)]
    return _allocate(a, targets, kinds, len(names), aliases)


class _Assembler:
    """Instructions in the order of the nodes, over values without registers yet."""

    def __init__(self, outs: Sequence[Expr], order: Sequence[Expr], names: Sequence[str], kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.constants: dict[tuple[float, str], _Value] = {}
        self.first: list[_Instruction] = []
        self.second: list[_Instruction] = []
        self.made = 0
        self.cached: dict[Any, _Value] = {}
        self.values: dict[Expr, _Value] = {}
        self.uses: dict[Expr, int] = {}
        for n in order:
            for arg in n.args if n.fn not in ("const", "sym") else ():
                self.uses[arg] = self.uses.get(arg, 0) + 1
        for e in outs:
            self.uses[e] = self.uses.get(e, 0) + 1
        operand = {name: i for i, name in enumerate(names)}
        self.same_along_row: set[Expr] = set()
        for n in order:
            if n.fn == "const" or (n.fn == "sym" and kinds[operand[n.args[0]]].endswith("scalar")):
                self.same_along_row.add(n)
            elif n.fn != "sym" and all(arg in self.same_along_row for arg in n.args):
                self.same_along_row.add(n)
        folded = {p for n in order for p in self.products(n)}
        for n in order:
            if n.fn == "sym":
                self.values[n] = self.load(operand[n.args[0]])
            elif n.fn == "const":
                self.values[n] = self.constant(n.args[0])
            elif n not in folded:
                self.values[n] = self.function(n)

    def products(self, n: Expr) -> tuple[Expr, ...]:
        """The factors' products that a sum or difference takes into itself: those that nothing else reads."""
        if n.fn not in ("add", "sub") or n in self.same_along_row:
            return ()
        found = tuple(p for p in dict.fromkeys(n.args) if p.fn == "mul" and self.uses[p] == 1 and p not in self.same_along_row)
        return found if len(found) < 2 or (n.fn == "add" and all(self.scaled(p) for p in found)) else found[:1]

    def scaled(self, product: Expr) -> bool:
        return any(f in self.same_along_row for f in product.args)

    def emit(self, op: str, *args: _Value, scalar: bool = False, mask: bool = False) -> _Value:
        value = _Value(("made", self.made), scalar, mask)
        self.made += 1
        (self.first if scalar else self.second).append(_Instruction(op, args, value))
        return value

    def constant(self, number: Any) -> _Value:
        if isinstance(number, bool):
            value = self.emit("ne_vv", self.constant(float(number)), self.constant(0.0), scalar=True, mask=True)
        else:
            value = _Value(("const", len(self.constants)), True, False)
            return self.constants.setdefault((float(number), repr(float(number))), value)
        return value

    def load(self, i: int) -> _Value:
        """An input as numbers or as a mask; what does not lie in unit stride is gathered into scratch."""
        kind = self.kinds[i]
        value = _Value(("in", i), kind.endswith("scalar"), False)
        if kind.startswith("?"):
            return self.emit("load_bool", value, scalar=value.scalar, mask=True)
        return self.emit("gather", value) if kind == "strided" else value

    def number(self, v: _Value) -> _Value:
        if not v.mask:
            return v
        if ("number", v) not in self.cached:
            one, zero = self.constant(1.0), self.constant(0.0)
            self.cached["number", v] = self.emit("where_vv" if v.scalar else "where_ss", v, one, zero, scalar=v.scalar)
        return self.cached["number", v]

    def mask(self, v: _Value) -> _Value:
        if v.mask:
            return v
        if ("mask", v) not in self.cached:
            self.cached["mask", v] = self.emit("ne_vv" if v.scalar else "ne_vs", v, self.constant(0.0), scalar=v.scalar, mask=True)
        return self.cached["mask", v]

    def vector(self, v: _Value) -> _Value:
        if not v.scalar:
            return v
        if ("vector", v) not in self.cached:
            self.cached["vector", v] = self.emit("fill", v, mask=v.mask)
        return self.cached["vector", v]

    def function(self, n: Expr) -> _Value:
        if folded := self.products(n):
            return self.fused(n, folded)
        fn, args = n.fn, [self.values[a] for a in n.args]
        scalar, mask = n in self.same_along_row, fn in BOOLEAN
        if fn == "where":
            c, x, y = self.mask(args[0]), self.number(args[1]), self.number(args[2])
            if scalar:
                return self.emit("where_vv", c, x, y, scalar=True)
            return self.emit(f"where_{self.shapes(x, y)}", self.vector(c), x, y)
        if fn == "not":
            return self.emit("not", self.mask(args[0]), scalar=scalar, mask=True)
        if fn in _MASKS:
            args = [self.mask(a) for a in args]
            args = args if scalar else [self.vector(a) for a in args]
            return self.emit(f"{fn}_vv", *args, scalar=scalar, mask=True)
        args = [self.number(a) for a in args]
        if len(args) == 1:
            return self.emit(f"{fn}_v", *args, scalar=scalar, mask=mask)
        if scalar:
            return self.emit(f"{fn}_vv", *args, scalar=True, mask=mask)
        if args[0].scalar and fn not in _ORDERED:
            fn, args = _MIRROR.get(fn, fn), args[::-1]
        return self.emit(f"{fn}_{self.shapes(*args)}", *args, mask=mask)

    def fused(self, n: Expr, folded: tuple[Expr, ...]) -> _Value:
        factors = [self.factors(p) for p in folded]
        if len(folded) == 2:
            return self.emit("axpby", *factors[0], *factors[1])
        other = self.number(self.values[n.args[1] if n.args[0] is folded[0] else n.args[0]])
        op = "muladd" if n.fn == "add" else "mulsub" if n.args[0] is folded[0] else "submul"
        args = (*factors[0], other)
        return self.emit(f"{op}_{self.shapes(*args)}", *args)

    def factors(self, product: Expr) -> tuple[_Value, _Value]:
        x, y = (self.number(self.values[a]) for a in product.args)
        return (y, x) if x.scalar else (x, y)

    @staticmethod
    def shapes(*args: _Value) -> str:
        return "".join("s" if v.scalar else "v" for v in args)

    def result(self, e: Expr, kind: str) -> _Value:
        """The value to be stored, a fresh one of the second list: stores come last, and what they read must not lie in an input."""
        value = self.values[e]
        value = self.mask(value) if kind.startswith("?") else self.number(value)
        value = self.vector(value)
        return self.emit("copy_v", value, mask=value.mask) if value.where[0] == "in" else value


def _allocate(
    a: _Assembler, targets: Sequence[_Value], kinds: Sequence[str], inputs: int, aliases: Sequence[tuple[int, int]]
) -> _Code | None:
    """Registers for all values. A result goes straight into its output where no input of that memory is read afterwards."""
    last: dict[tuple[str, int], int] = {}
    for i, ins in enumerate(a.second):
        for v in ins.args:
            last[v.where] = i
    born = {ins.value.where: i for i, ins in enumerate(a.second)}
    placed: dict[tuple[str, int], int] = {}
    stores: list[tuple[str, int, _Value]] = []
    for k, value in enumerate(targets):
        out = inputs + k
        clash = max((last.get(("in", i), -1) for i, o in aliases if o == k), default=-1)
        if kinds[out].startswith("?"):
            stores.append(("store_bool", out, value))
        elif not kinds[out].endswith("vector") and kinds[out] != "scalar":
            stores.append(("scatter", out, value))
        elif value.where in placed or clash > born[value.where]:
            stores.append(("copy_v", out, value))
        else:
            placed[value.where] = out
    for _, _, value in stores:
        last[value.where] = len(a.second)

    base = len(kinds)
    constants = [number for number, _ in a.constants]
    register = {("in", i): i for i in range(base)} | {("const", i): base + i for i in range(len(constants))}
    base += len(constants)
    for i, ins in enumerate(a.first):
        register[ins.value.where] = base + i
    base += len(a.first)
    free: list[int] = []
    vectors = 0
    second = []
    for i, ins in enumerate(a.second):
        args = [register[v.where] for v in ins.args]
        for where in {v.where for v in ins.args}:
            if last[where] == i and where in born and where not in placed:
                free.append(register[where])
        if ins.value.where in placed:
            target = placed[ins.value.where]
        elif free:
            target = free.pop()
        else:
            target, vectors = base + vectors, vectors + 1
        register[ins.value.where] = target
        second.append((ins.op, target, args))
    second += [(op, out, [register[v.where]]) for op, out, v in stores]
    if base + vectors > 256:
        return None
    first = [(ins.op, register[ins.value.where], [register[v.where] for v in ins.args]) for ins in a.first]
    cost = sum(_COST.get(op.partition("_")[0], 60) for op, _, _ in second)
    return _Code(tuple(constants), _pack(first), _pack(second), len(a.first), vectors, cost)


def _pack(instructions: Sequence[tuple[str, int, Sequence[int]]]) -> tuple[int, ...]:
    code = _opcodes()
    return tuple(code[op] | d << 8 | sum(r << 16 + 8 * i for i, r in enumerate(args)) for op, d, args in instructions)
