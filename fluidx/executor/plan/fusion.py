"""Fusion: a chain of neighbouring elementwise operators over values of one shape becomes one step, which passes over memory once.

A chain is an operator and the following operators that read its result. A result that nothing else reads is not stored. The order of
operations on each element stays, so fused and separate steps of the vector machine give the same bits. A 16-bit result that is not stored
is rounded as if it were. Casts between float32 and 16 bits are operators of a chain like others: loads and stores of another type.

The first operator may be one whose kernel takes a tail, such as a matrix product. The others (the tail) then run over each part of its
result as soon as the part is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain as joined
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.dtypes import HALVES, dtype_name, np_dtype
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator, op_types
from ...ir.types import TensorType
from ...ops.expr.native import always_fits, bind_native
from ...ops.expr.nodes import Expr, make_node, rebuild, sym
from ...ops.kernels import native_calls
from .liveness import op_reads, op_writes
from .selection import Outline
from .shadows import LayoutKeys, Shadows
from .sizes import RankSizes

Array = Callable[[str], np.ndarray]  # the array of a value
Dtype = Callable[[str], str]  # its dtype, also if it has no array

_MOST_ANSWERS = 1 << 14
_ANSWERS: dict[Hashable, tuple[bool, Any]] = {}  # are there kernel calls for a chain? Attributes are kept because the key has their ids
_PICKS = ("neg", "abs", "sign", "min", "max", "floor", "ceil", "round")  # functions of 16-bit numbers that need no rounding
_MOST = 16  # operators in one chain: more would not fit into the registers of the vector machine


def chains(sizes: RankSizes, shadows: Shadows, outline: Outline, layouts: Mapping[str, LayoutKeys]) -> list[tuple[Operator, ...]]:
    """All operators in order, with the operators of a chain in one tuple. `layouts`: the layout of each value in its own storage."""
    types, here = sizes.types, sizes.here
    needed = _needed(outline, sizes) if here else outline.fact(_needed)
    units: list[tuple[Operator, ...]] = []
    chain: list[Operator] = []
    made: set[str] = set()

    def shadow(name: str) -> np.ndarray:
        return shadows.of(types[name])

    def dtype(name: str) -> str:
        return types[name].dtype

    def covered(stored: Sequence[str]) -> bool:
        names = [n for op in chain for n in op.input_arg_names]
        # the number of loops depends on no size above 1. Whether rows are long enough for a tail depends on all sizes but axis 0, because
        # with several rows axis 0 is not part of a row
        row = types[stored[0]].shape[1:] if opdef(chain[0].type).native.tail else ()
        key = (id(chain[0]), len(chain), *stored, row, *[layouts[n].rough for n in (*names, *stored)])
        known = outline.chains.get(key)
        if known is None:
            alike = row, *_wired(chain, stored, layouts)
            if (found := _ANSWERS.get(alike)) is None:
                known = covers(chain, stored, shadow, dtype)
                if not _any_size(chain, stored, shadow, dtype):
                    return known
                if len(_ANSWERS) >= _MOST_ANSWERS:
                    _ANSWERS.clear()
                found = _ANSWERS[alike] = known, [op.attrs for op in chain]
            known = outline.chains[key] = found[0]
        return known

    def close() -> None:
        while chain:
            stored = _outputs(chain, needed) if len(chain) > 1 else []
            if len(chain) == 1 or stored and covered(stored):
                units.append(tuple(chain))
                chain.clear()
            else:  # if the first takes a tail, the operators behind it may be a chain by themselves
                first = 1 if opdef(chain[0].type).native.tail else len(chain)
                units.extend((op,) for op in chain[:first])
                del chain[:first]
        made.clear()

    for op, may in zip(outline.ops, outline.fact(_fusable), strict=True):
        fits = may and id(op) not in here and _is_float(op, types)
        if chain:
            goes_on = fits and not opdef(op.type).native.tail and len(chain) < _MOST and not made.isdisjoint(op.input_arg_names)
            if not (goes_on and types[op.output_arg_names[0]].shape == types[chain[0].output_arg_names[0]].shape):
                close()
        if fits:
            chain.append(op)
            made.add(op.output_arg_names[0])
        else:
            units.append((op,))
    close()
    return units


def fused(
    chain: Sequence[Operator], stored: Sequence[str], array: Array, dtype: Dtype, scratch: Sequence[np.ndarray] = ()
) -> list[native.NativeCall]:
    """The kernel calls of a chain, over the arrays that it reads and stores; `dtype` is that of each result. `scratch` are the scratch
    arrays of its first operator."""
    calls = _calls(chain, stored, array, dtype, scratch)
    assert calls is not None, "the operands of a planned chain have other layouts now"
    return calls


def covers(chain: Sequence[Operator], stored: Sequence[str], shadow: Array, dtype: Dtype) -> bool:
    """Are there kernel calls for a chain whose operands have the layouts of these shadow arrays?"""
    return _calls(chain, stored, shadow, dtype, dry=True) is not None


def _outputs(chain: Sequence[Operator], needed: Mapping[str, int]) -> list[str]:
    """The results in a chain that something outside of it reads. `needed` counts all readers of each value."""
    inside: dict[str, int] = {}
    for op in chain:
        for n in op.input_arg_names:
            inside[n] = inside.get(n, 0) + 1
    return [n for op in chain if needed.get(n := op.output_arg_names[0], 0) > inside.get(n, 0)]


def _calls(
    chain: Sequence[Operator], stored: Sequence[str], array: Array, dtype: Dtype, scratch: Sequence[np.ndarray] = (), dry: bool = False
) -> list[native.NativeCall] | None:
    first, definition = chain[0], opdef(chain[0].type)
    if not definition.native.tail:
        call = _elementwise(chain, stored, array, dtype, dry)
        return None if call is None else [call]
    out, rest = first.output_arg_names[0], [n for op in chain[1:] if (n := op.output_arg_names[0]) in stored]
    # holds the first operator's result until the tail has read it
    place = next((array(n) for n in ((out,) if out in stored else rest) if dtype(n) == dtype(out)), None)
    if not rest or place is None:
        return None

    def layouts(name: str) -> np.ndarray:
        return place if name == out else array(name)

    ins, outs = definition.operands(first, layouts, layouts)
    calls = native_calls(definition, ins, outs, first.attrs, dry=dry, **({"scratch": scratch} if scratch else {}))
    tail = _elementwise(chain[1:], rest, layouts, dtype, dry, tail=True)
    if not calls or tail is None or not calls[-1].tail:
        return None
    return calls if dry else [*calls[:-1], native.then(calls[-1], tail)]


def _elementwise(
    chain: Sequence[Operator], stored: Sequence[str], array: Array, dtype: Dtype, dry: bool, tail: bool = False
) -> native.NativeCall | None:
    return bind_native(*_operands(chain, stored, array, dtype), dry, tail)


def _wired(chain: Sequence[Operator], stored: Sequence[str], layouts: Mapping[str, LayoutKeys]) -> Iterator[Hashable]:
    """A key that is equal for two chains with equal operators, wiring and operand layouts, whatever the names are."""
    number: dict[str, int] = {}
    for op in chain:
        names = (*op.input_arg_names, *op.output_arg_names)
        yield (op.type, id(op.attrs), *op.inputs, *map(len, op.inputs.values()), *[number.setdefault(n, len(number)) for n in names])
    yield tuple([number[n] for n in stored])
    yield tuple([layouts[n].rough for n in number])


def _any_size(chain: Sequence[Operator], stored: Sequence[str], array: Array, dtype: Dtype) -> bool:
    """Does it depend on the loops over the results alone whether there are calls for a chain?"""
    first, formulas = opdef(chain[0].type), chain
    if first.native.tail:
        said, formulas = first.native.any_size, chain[1:]
        stored = [n for op in formulas if (n := op.output_arg_names[0]) in stored]
        if not stored or not (said(chain[0].attrs) if callable(said) else said):
            return False
    exprs, values, outs = _operands(formulas, stored, array, dtype)
    return always_fits(exprs, len(values) + len(outs))


def _operands(
    chain: Sequence[Operator], stored: Sequence[str], array: Array, dtype: Dtype
) -> tuple[list[Expr], dict[str, np.ndarray], list[np.ndarray]]:
    """Three results: an expression for each stored value, over symbols for the operands (one symbol for each shape that an operand is read
    in); the arrays of the symbols; the arrays of the stored values."""
    number: dict[str, int] = {}  # of the values that the chain computes
    symbols: dict[tuple[str, tuple[int, ...]], str] = {}  # equal chains get equal symbols, so they are assembled once
    shape = array(stored[0]).shape
    parts: list[_ChainPart] = []
    for op in chain:
        element, reads = _formula(opdef(op.type)), op.input_arg_names
        assert element is not None
        e, shapes = element(op.attrs, [shape if n in number else array(n).shape for n in reads], len(shape))
        operands = tuple([
            (name, number[n] if n in number else symbols.setdefault((n, aligned), f"v{len(symbols)}"))
            for (name, aligned), n in zip(shapes.items(), reads, strict=True)
        ])  # fmt: skip
        number[op.output_arg_names[0]] = len(parts)
        rounded = d if (d := dtype(op.output_arg_names[0])) in HALVES else ""
        alike = [s for (_, s), n in zip(operands, reads, strict=True) if isinstance(s, str) and dtype_name(array(n).dtype) == rounded]
        parts.append(_ChainPart(e, operands, rounded, frozenset(alike)))
    exprs = _composed(tuple(parts), tuple([number[n] for n in stored]))
    values = {symbol: a if (a := array(n)).shape == aligned else a.reshape(aligned) for (n, aligned), symbol in symbols.items()}
    return exprs, values, [array(n) for n in stored]


class _ChainPart(NamedTuple):
    """The expression of one operator in a chain."""

    expr: Expr
    operands: tuple[tuple[str, int | str], ...]  # an earlier part or another symbol for each symbol of the expression
    rounded: str  # the dtype of the result if it has 16 bits, otherwise ""
    alike: frozenset[str]  # operands from memory that have this dtype


@lru_cache(maxsize=1024)
def _composed(parts: tuple[_ChainPart, ...], stored: tuple[int, ...]) -> list[Expr]:
    """The expressions of the stored parts. What is stored is rounded then; what later parts read of a 16-bit result is rounded here."""
    made: list[Expr] = []
    read: list[Expr] = []
    for e, operands, rounded, alike in parts:
        made.append(_grafted(e, {name: sym(o) if isinstance(o, str) else read[o] for name, o in operands}))
        read.append(make_node(rounded, made[-1]) if rounded and not _is_exact(made[-1], rounded, alike) else made[-1])
    return [made[k] for k in stored]


def _is_exact(e: Expr, dtype: str, alike: Container[str]) -> bool:
    """Is the value one of this 16-bit dtype without rounding, if the symbols in `alike` are?"""
    if e.fn == "const":
        with np.errstate(over="ignore"):
            return float(np_dtype(dtype).type(e.args[0])) == e.args[0]
    if e.fn in ("sym", dtype):
        return e.fn == dtype or e.args[0] in alike
    picks = e.args[1:] if e.fn == "where" else e.args if e.fn in _PICKS else ()
    return bool(picks) and all(_is_exact(a, dtype, alike) for a in picks)


def _grafted(e: Expr, values: Mapping[str, Expr]) -> Expr:
    """Substitute expressions into `e` without simplifying: two products with constants would become one, which rounds once."""
    return rebuild(e, lambda n, args: values[n.args[0]] if n.fn == "sym" else make_node(n.fn, *args) if args else None)


def _needed(outline: Outline, sizes: RankSizes | None = None) -> dict[str, int]:
    """The number of readers of each value; a fetch counts as one. `sizes` say what operators read (default: all inputs)."""
    found = Counter(joined.from_iterable(outline.fact(op_reads) if sizes is None else sizes.all_reads(outline)))
    found.update(set(outline.fetch))
    return found


def _fusable(outline: Outline) -> list[bool]:
    """For each operator: is it elementwise or does it take a tail, and is its result a temporary value that is written once in a run?"""
    fusable = {t for t in op_types(outline.ops) if opdef(t).native.tail or _formula(opdef(t)) is not None}
    written = Counter(joined.from_iterable(outline.fact(op_writes)))
    given, descs = {*outline.given}, outline.program.global_block().descs

    def once(name: str) -> bool:
        return written[name] == 1 and name not in given and (d := descs.get(name)) is not None and not d.persistable

    return [op.type in fusable and once(op.output_arg_names[0]) for op in outline.ops]


def _is_float(op: Operator, types: Mapping[str, TensorType]) -> bool:
    """Do all operands have dtypes for which the vector machine has one kind of registers?"""
    dtypes = {types[n].dtype for n in (*op.input_arg_names, *op.output_arg_names)}
    return dtypes == {"float64"} or dtypes <= {"float32", *HALVES}


def _formula(definition: type[OpDef]) -> Callable[..., tuple[Expr, dict[str, tuple[int, ...]]]] | None:
    """The expression of an elementwise op over its operands. A cast between floats is its operand: only the element type changes."""
    return _as_it_is if definition.name == "cast" else definition.expr


def _as_it_is(attrs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], ndim: int) -> tuple[Expr, dict[str, tuple[int, ...]]]:
    return sym("x"), {"x": shapes[0]}
