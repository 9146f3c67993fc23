"""Scalar expressions on the vector machine of `fluidx.native`: one call computes several outputs in one pass over memory.

`bind_native` returns the call, or None for anything that the machine does not support: dtypes other than floats and bool, powers,
remainders, sine, cosine, and operands that need more than three loops. 16-bit floats are widened to float32 where they are loaded, and
rounded where they are stored; they mix with float32. Sums, products, quotients, roots, extrema and comparisons are
bitwise equal to NumPy's for the same order of operations. The error of exp, log, tanh, erf and related functions is at most two units in
the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.dtypes import HALVES, dtype_name
from .nodes import BOOLEAN, COMPARE, Expr, nodes, symbols

_UNARY = {"neg", "abs", "sqrt", "rsqrt", "exp", "log", "log1p", "tanh", "sigmoid", "softplus", "erf", "sign", "floor", "ceil", "round",
          *HALVES}  # fmt: skip
_COMMUTING, _ORDERED = {"add", "mul"}, {"sub", "div", "min", "max"}
_MIRROR = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}
_TESTS, _MASKS = {"isnan", "isinf", "isfinite"}, {"and", "or", "xor"}
_KNOWN = {*_UNARY, *_COMMUTING, *_ORDERED, *COMPARE, *_TESTS, *_MASKS, "not", "where", "const", "sym"}

# Rough picoseconds per element in float32 with AVX-512. They only decide how much work a thread gets.
_COST = {
    "exp": 300, "log": 400, "log1p": 500, "tanh": 400, "sigmoid": 450, "softplus": 800, "erf": 450,
    "div": 150, "sqrt": 150, "rsqrt": 250,
}  # fmt: skip

_TAIL_COLUMNS = 128  # smallest length of a row: it is faster to process several shorter rows at a time, which a tail cannot do


def bind_native(
    outs: Sequence[Expr], values: Mapping[str, np.ndarray], arrays_out: Sequence[np.ndarray], dry: bool = False, tail: bool = False
) -> native.NativeCall | None:
    """The call that computes `outs` from the arrays in `values` into `arrays_out`, or None if something is not supported.

    The outputs share one shape, to which the inputs broadcast. An output may be one of the inputs, with the same address and strides; any
    other overlap is not supported. `dry`: the arrays have shapes and strides but share memory; the only question is whether there is a
    call. `tail`: the call will be attached to another one (`native.then`).
    """
    outs = tuple(outs)
    arrays = [*[values[n] for n in _names(outs)], *arrays_out]
    layout = tuple([(dtype_name(a.dtype), a.shape, a.strides) for a in arrays])
    if dry:
        return _DRY if _frame(outs, layout, (), tail) is not None else None
    addresses = [native.address(a) for a in arrays]
    aliases = _aliases(addresses, layout, len(arrays_out))
    frame = None if aliases is None else _frame(outs, layout, aliases, tail)
    if frame is None:
        return None
    operands = [w for address, s, one in zip(addresses, frame.strides, layout, strict=True) for w in (address, *s, _WIDTH[one[0]])]
    return native.NativeCall(frame.fn, (*frame.head, *operands, *frame.tail), tuple(arrays))


def expression_calls(e: Expr, values: Mapping[str, Any], out: Any, dry: bool) -> list[native.NativeCall] | None:
    """Calls that compute one expression into `out`, or None; the arguments are those of `bind_native`."""
    call = bind_native([e], values, [out], dry)
    return None if call is None else [call]


def always_fits(outs: Sequence[Expr], operands: int) -> bool:
    """Is there a call for all operands of the right dtypes that need at most three loops? That is so if no mix of scalar, vector and
    strided operands needs too many registers.
    """
    order = {n for e in outs for n in nodes(e)}
    # a node is one instruction, and its value may be needed as a number, as a mask and as a vector, each in a register; and 0 and 1
    return all(n.fn in _KNOWN for n in order) and operands + 7 * len(order) + 2 * len(outs) + 2 <= _REGISTERS


_DRY = native.NativeCall("", ())
_REGISTERS = 256
_FUNCTIONS = {"float32": "vm_f32", "float64": "vm_f64", **dict.fromkeys(HALVES, "vm_f32")}
_PREFIX = {d: d for d in ("bool", *HALVES)}  # of the kind of access to an operand
_WIDTH = {"bool": 1, "float32": 4, "float64": 8, **dict.fromkeys(HALVES, 2)}

Layout = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # dtype, shape and strides of each operand


@lru_cache(maxsize=4096)
def _names(outs: tuple[Expr, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for e in outs for n in symbols(e)))


class _Frame(NamedTuple):
    """A call without addresses."""

    fn: str
    head: tuple[int, ...]
    strides: list[tuple[int, ...]]
    tail: tuple[int | float, ...]


@lru_cache(maxsize=4096)
def _frame(outs: tuple[Expr, ...], layout: Layout, aliases: tuple[tuple[int, int], ...], tail: bool = False) -> _Frame | None:
    """The call for operands of this layout, the results last; `aliases` are (input, output) pairs in the same memory."""
    nest = _loop_nest(outs, layout, tail)
    if nest is None:
        return None
    fn, sizes, strides, kinds, packed = nest
    code = _assemble(outs, _names(outs), kinds, aliases)
    if code is None:
        return None
    counts = (len(layout), len(code.constants), code.scalars, code.vectors, len(code.first), len(code.second))
    cost = code.cost if fn == "vm_f32" else 2 * code.cost
    return _Frame(fn, (*sizes, packed, cost, *counts), strides, (*code.constants, *code.first, *code.second))


@lru_cache(maxsize=4096)
def _loop_nest(outs: tuple[Expr, ...], layout: Layout, tail: bool) -> tuple[str, Any, list[tuple[int, ...]], tuple[str, ...], int] | None:
    """The kernel, the sizes of its loops, the strides of each operand in them, the kind of access to each operand, and whether rows are
    packed.
    """
    lead = layout[-len(outs)]
    functions = {_FUNCTIONS.get(dtype) for dtype, _, _ in layout if _PREFIX.get(dtype) != "bool"}
    if len(functions) != 1 or (fn := functions.pop()) is None or any(shape != lead[1] for _, shape, _ in layout[-len(outs) :]):
        return None
    loops = _loops(layout, lead)
    if loops is None:
        return None
    sizes, strides = loops
    names, inputs = _names(outs), len(layout) - len(outs)
    kinds = tuple([_access_kind(s[2], dtype) for s, (dtype, _, _) in zip(strides, layout, strict=True)])
    scalars = frozenset(n for n, kind in zip(names, kinds, strict=False) if kind.endswith("scalar"))
    if tail and sizes[:2] != (1, 1) and sizes[2] < _TAIL_COLUMNS:
        return None
    packed = None if tail else _packed(sizes, strides, kinds, inputs, _has_row_work(outs, scalars))
    return fn, sizes, strides, packed or kinds, int(packed is not None)


# -- from arrays to three loops ------------------------------------------------------------------------------------------------------


def _loops(layout: Layout, lead: tuple[str, tuple[int, ...], tuple[int, ...]]) -> tuple[Any, list[tuple[int, ...]]] | None:
    """Sizes of three loops and the strides of each operand in them, in bytes; axes that are contiguous in every operand are merged."""
    _, shape, order = lead
    if 0 in shape:  # an empty array is contiguous for any strides, as in NumPy
        return (1, 1, 0), [(0, 0, _WIDTH[dtype]) for dtype, _, _ in layout]
    if layout.count(lead) == len(layout) and _is_dense(*lead):
        size = prod(shape)
        return (1, 1, size), [(0, 0, _WIDTH[lead[0]] if size > 1 else 0)] * len(layout)
    full = []
    for _, own, strides in layout:
        extra = len(shape) - len(own)
        if extra < 0 or any(n not in (1, d) for n, d in zip(own, shape[extra:], strict=True)):
            return None
        full.append((*[0] * extra, *(0 if n == 1 else s for n, s in zip(own, strides, strict=True))))
    axes = sorted((i for i, n in enumerate(shape) if n != 1), key=lambda i: -abs(order[i]))
    sizes: list[int] = []
    joined: list[list[int]] = [[] for _ in layout]
    for i in axes:
        if sizes and all(s[-1] == f[i] * shape[i] for s, f in zip(joined, full, strict=True)):
            sizes[-1] *= shape[i]
            for s, f in zip(joined, full, strict=True):
                s[-1] = f[i]
        else:
            sizes.append(shape[i])
            for s, f in zip(joined, full, strict=True):
                s.append(f[i])
    if len(sizes) > 3:
        return None
    missing = 3 - len(sizes)
    return (*[1] * missing, *sizes), [(*[0] * missing, *s) for s in joined]


def _is_dense(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Are the elements contiguous in the order of the axes?"""
    step = _WIDTH[dtype]
    for n, s in zip(reversed(shape), reversed(strides)):
        if n != 1:
            if s != step:
                return False
            step *= n
    return True


@lru_cache(maxsize=4096)
def _extent(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """First byte and end byte, relative to the address of the first element; (0, 0) for an empty array."""
    if 0 in shape:
        return 0, 0
    ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + _WIDTH.get(dtype, 16)


def _aliases(addresses: Sequence[int], layout: Layout, outs: int) -> tuple[tuple[int, int], ...] | None:
    """(input, output) pairs in the same memory, or None if two operands overlap in another way."""
    ins = len(layout) - outs
    spans = [(address + low, address + high) for address, (low, high) in zip(addresses, [_extent(*one) for one in layout], strict=True)]
    pairs = []
    for k in range(ins, len(layout)):
        start, stop = spans[k]
        for i in range(k):
            if spans[i][0] < stop and start < spans[i][1]:
                if i >= ins or addresses[i] != addresses[k] or layout[i][0] != layout[k][0] or _steps(layout[i]) != _steps(layout[k]):
                    return None
                pairs.append((i, k - ins))
    return tuple(pairs)


def _steps(one: tuple[str, tuple[int, ...], tuple[int, ...]]) -> list[tuple[int, int]]:
    """Size and stride of each axis with more than one element; the strides of the other axes do not matter."""
    return [(n, s) for n, s in zip(one[1], one[2], strict=True) if n != 1]


def _access_kind(stride: int, dtype: str) -> str:
    """The kind of access to an operand: scalar (constant along a row), vector (contiguous) or strided; as in "bool scalar" if the operand
    has another dtype than the registers."""
    bare = "scalar" if stride == 0 else "vector" if stride == _WIDTH[dtype] else "strided"
    return f"{_PREFIX[dtype]} {bare}" if dtype in _PREFIX else bare


@lru_cache(maxsize=1024)
def _has_row_work(outs: tuple[Expr, ...], scalars: frozenset[str]) -> bool:
    """Does some function have only scalar arguments?"""
    return any(n.fn not in ("const", "sym") and scalars.issuperset(symbols(n)) for e in outs for n in nodes(e))


def _packed(sizes: Any, strides: Any, kinds: Sequence[str], inputs: int, work: bool) -> Any:
    """The access kinds for a program that processes several rows at a time; None if rows are long enough or an operand does not allow it.

    The program then repeats a scalar of each row along the row, and computes functions of scalars (`work`) for every element.
    """
    _, rows, columns = sizes
    by_row = work and any(kind.endswith("scalar") and s[1] for kind, s in zip(kinds, strides, strict=True))
    if rows < 2 or not 0 < columns < (32 if by_row else 256):
        return None
    made = []
    for i, (s, kind) in enumerate(zip(strides, kinds, strict=True)):
        even = s[1] == columns * s[2]
        if not even and (i >= inputs or kind.startswith("bool")):
            return None
        made.append(kind if even else " ".join([*kind.split()[:-1], "vector"]))
    return tuple(made)


# -- from expressions to instructions ------------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A value of the program: its location, whether it is constant along a row, and whether it is a mask."""

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
    """Builds the instructions in the order of the nodes, on values without registers."""

    def __init__(self, outs: Sequence[Expr], order: Sequence[Expr], names: Sequence[str], kinds: Sequence[str]) -> None:
        self.kinds, self.outs = kinds, len(outs)
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
        """The products that become part of a sum or difference (fused multiply-add): those with no other reader."""
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
        """An input as numbers or as a mask; a strided input is gathered into scratch memory, a 16-bit one widened into it."""
        *dtype, kind = self.kinds[i].split()
        value = _Value(("in", i), kind == "scalar", False)
        if dtype == ["bool"]:
            return self.emit("load_bool", value, scalar=value.scalar, mask=True)
        if dtype:
            return self.emit(f"{'gather' if kind == 'strided' else 'load'}_{dtype[0]}", value, scalar=value.scalar)
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
        """The value to store, computed in the vector section: stores come last, and the source of one must not be an input, which another
        may have overwritten."""
        value = self.values[e]
        value = self.mask(value) if kind.startswith("bool") else self.number(value)
        value = self.vector(value)
        if value.where[0] != "in" or self.outs == 1 and kind.startswith(HALVES):
            return value
        return self.emit("copy_v", value, mask=value.mask)


def _allocate(
    a: _Assembler, targets: Sequence[_Value], kinds: Sequence[str], inputs: int, aliases: Sequence[tuple[int, int]]
) -> _Code | None:
    """Registers for all values. A result is computed directly in its output if no input in that memory is read later."""
    last = {v.where: i for i, ins in enumerate(a.second) for v in ins.args}
    placed, stores = _place(a, targets, kinds, inputs, aliases, last)
    last.update((value.where, len(a.second)) for _, _, value in stores)

    base = len(kinds)
    constants = [number for number, _ in a.constants]
    register = {("in", i): i for i in range(base)} | {("const", i): base + i for i in range(len(constants))}
    base += len(constants)
    for i, ins in enumerate(a.first):
        register[ins.value.where] = base + i
    base += len(a.first)
    defined = {ins.value.where for ins in a.second}
    free: list[int] = []
    vectors = 0
    second = []
    for i, ins in enumerate(a.second):
        args = [register[v.where] for v in ins.args]
        dead = [where for where in {v.where for v in ins.args} if last[where] == i and where in defined and where not in placed]
        free += [register[where] for where in dead]
        if ins.value.where in placed:
            target = placed[ins.value.where]
        elif free:
            target = free.pop()
        else:
            target, vectors = base + vectors, vectors + 1
        register[ins.value.where] = target
        second.append((ins.op, target, args))
    second += [(op, out, [register[v.where]]) for op, out, v in stores]
    if base + vectors > _REGISTERS:
        return None
    first = [(ins.op, register[ins.value.where], [register[v.where] for v in ins.args]) for ins in a.first]
    cost = sum(_COST.get(op.partition("_")[0], 60) for op, _, _ in second)
    return _Code(tuple(constants), _pack(first), _pack(second), len(a.first), vectors, cost)


def _place(
    a: _Assembler, targets: Sequence[_Value], kinds: Sequence[str], inputs: int, aliases: Sequence[tuple[int, int]],
    last: Mapping[tuple[str, int], int],
) -> tuple[dict[tuple[str, int], int], list[tuple[str, int, _Value]]]:  # fmt: skip
    """The results that are computed directly in an output, and the store instructions for the others; `last` are the last reads."""
    defined_at = {ins.value.where: i for i, ins in enumerate(a.second)}
    placed: dict[tuple[str, int], int] = {}
    stores: list[tuple[str, int, _Value]] = []
    for out, value in enumerate(targets, inputs):
        clash = max((last.get(("in", i), -1) for i, o in aliases if inputs + o == out), default=-1)
        *dtype, kind = kinds[out].split()
        if dtype:
            stores.append((f"{'scatter' if kind == 'strided' and dtype != ['bool'] else 'store'}_{dtype[0]}", out, value))
        elif kind == "strided":
            stores.append(("scatter", out, value))
        elif value.where in placed or clash > defined_at[value.where]:
            stores.append(("copy_v", out, value))
        else:
            placed[value.where] = out
    return placed, stores


def _pack(instructions: Sequence[tuple[str, int, Sequence[int]]]) -> tuple[int, ...]:
    code = _opcodes()
    return tuple(code[op] | d << 8 | sum(r << 16 + 8 * i for i, r in enumerate(args)) for op, d, args in instructions)
