"""The kernel of an op that its decomposition defines: the parts run in order, and share memory for the values between them.

>>> import numpy as np
>>> from fluidx.ir import opdef
>>> y, mean_square = np.empty((1, 2)), np.empty(1)
>>> opdef("rms_norm").kernel(np, np.array([[3.0, 4.0]]), None, out=(y, mean_square), begin_norm_axis=1, epsilon=0.0)
>>> y.round(3), mean_square
(array([[0.849, 1.131]]), array([12.5]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..ir.decomposition import decomposed, result_types
from ..ir.dtypes import np_dtype
from ..ir.errors import ProgramError
from ..ir.make_op import op_by_slots
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Frozen, Operator
from ..ir.parts import Part
from ..ir.types import TensorType
from .array_kernel import bind_kernel
from .shared.types import type_of


class _Plan(NamedTuple):
    """Parts in order, with the buffer of each value between them; a value without one is a view of another value."""

    parts: Sequence[Operator]
    types: Mapping[str, TensorType]
    buffers: Sequence[TensorType]
    place: Mapping[str, int]


def _result(slot: str) -> str:
    return f"{slot} out"


@lru_cache(maxsize=1024)
def _planned(
    definition: type[OpDef], attrs: tuple[tuple[str, Any], ...], ins: tuple[TensorType | None, ...], given: tuple[bool, ...],
    part: Part | None,
) -> _Plan:  # fmt: skip
    types = {s.name: t for s, t in zip(definition.in_slots, ins, strict=True) if t is not None}
    results = [s.name for s, has in zip(definition.out_slots, given, strict=True) if has]
    op = op_by_slots(definition.name, {n: (n,) for n in types}, {n: (_result(n),) for n in results}, Frozen(dict(attrs)))
    numbers = count()
    parts = list(_simple(op, lambda name: f"{name}.{next(numbers)}", types, part))
    return _Plan(parts, types, *_buffers(parts, types, {_result(n) for n in results}))


def _simple(op: Operator, fresh: Callable[[str], str], types: dict[str, TensorType], part: Part | None = None) -> Iterator[Operator]:
    """The parts of an operator that have kernels of their own; `types` gets the types of their results."""
    for p in decomposed(op, fresh, types.__getitem__, part) or ():
        if is_by_parts(opdef(p.type)):
            yield from _simple(p, fresh, types)
        else:
            types |= result_types(p, types.__getitem__)
            yield p


def _stand_in(t: TensorType) -> np.ndarray:
    """A contiguous array of this type whose elements must not be accessed."""
    strides = np.cumprod([1, *t.shape[:0:-1]])[::-1] * np_dtype(t.dtype).itemsize
    return np.lib.stride_tricks.as_strided(np.empty(1, np_dtype(t.dtype)), t.shape, strides[: t.ndim])


def _roots(parts: Sequence[Operator], types: Mapping[str, TensorType], results: set[str]) -> dict[str, str]:
    """For each value of a part, the value of which it is a view; itself if it is none."""
    root: dict[str, str] = {}
    seen: dict[str, Any] = {}
    for p in parts:
        d, names, source = opdef(p.type), p.output_arg_names, (p.input_arg_names or ("",))[0]
        root |= {n: n for n in names}
        if d.storage.view is None or len(names) > 1 or names[0] in results:
            continue
        x = seen.get(source)
        view = d.storage.view(_stand_in(types[source]) if x is None else x, **p.attrs)
        if view is not None:
            root[names[0]], seen[names[0]] = root.get(source, source), view
    return root


def _buffers(parts: Sequence[Operator], types: Mapping[str, TensorType], results: set[str]) -> tuple[list[TensorType], dict[str, int]]:
    """Buffers for the values between the parts. A value takes that of an earlier one of its type that is not read any more."""
    root = _roots(parts, types, results)
    last = {root.get(n, n): k for k, p in enumerate(parts) for n in p.input_arg_names}
    buffers, place, free = list[TensorType](), dict[str, int](), list[int]()
    for k, p in enumerate(parts):
        dead = [n for n in dict.fromkeys(root.get(n, n) for n in p.input_arg_names) if n in place and last[n] == k]
        over = {p.outputs[o][0]: p.inputs[i][0] for i, o in opdef(p.type).storage.inplace if p.inputs.get(i) and p.outputs.get(o)}
        for n in p.output_arg_names:
            if n in results or root[n] != n:
                continue
            source = over.get(n, "")
            if source in dead and types[source] == types[n]:
                place[n] = place[source]
                dead.remove(source)
                continue
            found = next((b for b in free if buffers[b] == types[n]), None)
            if found is None:
                buffers.append(types[n])
            else:
                free.remove(found)
            place[n] = len(buffers) - 1 if found is None else found
        free += [place[n] for n in dead]
    return buffers, place


def _plan_for(definition: type[OpDef], ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any], part: Part | None) -> _Plan:
    types = tuple([t if t is None or isinstance(t, TensorType) else type_of(t) for t in ins])
    hashable: Any = definition
    return _planned(hashable, tuple(attrs.items()), types, tuple([o is not None for o in outs]), part)


def parts_scratch(definition: type[OpDef], ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any]) -> Sequence[TensorType]:
    """The types of the buffers; none for a part of a larger value that is not valid by itself."""
    try:
        return _plan_for(definition, ins, outs, attrs, None).buffers
    except ProgramError:
        return ()


def bind_parts(
    bind: Callable[..., Any], definition: type[OpDef], xp: Any, ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any], ctx: Any,
    part: Part | None, scratch: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """The calls of the parts, each bound by `bind`, with the buffers `scratch` if they are those of this plan."""
    if all(o is None or not o.size for o in outs):
        return []
    plan = _plan_for(definition, ins, outs, attrs, part)
    fits = [type_of(a) for a in scratch] == list(plan.buffers)
    memory = scratch if fits else [xp.empty(t.shape, np_dtype(t.dtype)) for t in plan.buffers]
    values = {s.name: a for s, a in zip(definition.in_slots, ins, strict=True)}
    values |= {_result(s.name): a for s, a in zip(definition.out_slots, outs, strict=True)}
    calls = []
    for p in plan.parts:
        d, made = opdef(p.type), [n for n in p.output_arg_names if n not in values]
        if made and made[0] not in plan.place and (view := d.view_of(values[p.input_arg_names[0]], ctx, p.attrs)) is not None:
            values[made[0]] = view
            continue
        for n in made:
            t = plan.types[n]
            values[n] = memory[plan.place[n]] if n in plan.place else xp.empty(t.shape, np_dtype(t.dtype))
        calls.append(bind(d, xp, *d.operands(p, values.__getitem__, values.__getitem__), p.attrs, ctx))
    return calls


def _kernel(cls: type[OpDef], xp: Any, *ins: Any, out: Any, part: Part | None = None, **attrs: Any) -> None:
    outs = out if len(cls.out_slots) > 1 else [out]
    with np.errstate(all="ignore"):  # as in a run of the executor
        for call in bind_parts(bind_kernel, cls, xp, ins, outs, attrs, None, part, ()):
            call()


by_parts: Any = classmethod(_kernel)


def is_by_parts(definition: type[OpDef]) -> bool:
    return getattr(definition.kernel, "__func__", None) is _kernel
