"""Write operators by calling them: `b.matmul(x, y, transpose_x=True)`. Layers, gradients and passes all build this way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from . import unique_name
from .errors import ProgramError
from .opdef import opdef
from .operator import Operator, Role
from .program import Block
from .site import wrong
from .variable import Variable


class Builder:
    """Appends operators to one block and hands back their outputs.

    Arguments follow the op's input slots (a list for a "X*" slot, None for an absent one), attributes are keywords.
    `name=` names a single output; `out={"Slot": variable or name}` directs outputs, None leaves an optional one away.
    The result is one Variable, or a tuple in slot order (absent ones None, a list for a "X*" slot).
    """

    def __init__(self, block: Block, role: Role | None = None, owner: str | None = None, role_var: tuple[str, ...] = ()):
        self.block = block
        self.role = role
        self.owner = owner
        self.role_var = role_var

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(op_type)
        return partial(self.emit, op_type)

    def emit(
        self, op_type: str, *args: Any, name: str | None = None, out: Mapping[str, Any] | None = None, n_out: int = 0, **attrs: Any
    ) -> Any:
        """Append `op_type` and return its outputs. `n_out` is the number of names for a "X*" output."""
        definition = opdef(op_type)
        if len(args) > len(definition.in_slots):
            raise ProgramError(f"op {op_type} takes {len(definition.in_slots)} inputs ({', '.join(definition.inputs)}), got {len(args)}")
        inputs = {s.name: a for s, a in zip(definition.in_slots, args, strict=False) if a is not None}
        out = dict(out or {})
        outputs: dict[str, Any] = {}
        for k, slot in enumerate(definition.out_slots):
            if slot.name in out:
                outputs[slot.name] = out[slot.name]
            elif slot.many:
                base = name or self._fresh(f"{op_type}.tmp", ".0")
                outputs[slot.name] = [f"{base}.{i}" for i in range(n_out)]
            elif k == 0 and name:
                outputs[slot.name] = name
            else:
                outputs[slot.name] = self._fresh(f"{op_type}.{slot.name.lower()}" if k else f"{op_type}.tmp")
        outputs = {k: v for k, v in outputs.items() if v is not None}
        op = self.block.append_op(op_type, inputs, outputs, attrs, role=self.role, role_var=self.role_var, owner=self.owner)
        results = [self._result(op, s.name, s.many) for s in definition.out_slots]
        return results[0] if len(results) == 1 else tuple(results)

    def _fresh(self, key: str, first: str = "") -> str:
        """A new name. A program may be continued under another `unique_name.guard`, which counts from 0 again."""
        name = unique_name.generate(key)
        while self.block.find(name + first) is not None:
            name = unique_name.generate(key)
        return name

    def _result(self, op: Operator, slot: str, many: bool) -> Any:
        names = op.outputs.get(slot, ())
        if many:
            return [self.block.var(n) for n in names]
        return self.block.var(names[0]) if names else None


def slice_variable(x: Variable, index: Any) -> Variable:
    """Build `x[index]` from slice, strided_slice, squeeze and unsqueeze operators."""
    index = index if isinstance(index, tuple) else (index,)
    real = sum(1 for i in index if i is not None and i is not Ellipsis)
    if real > x.ndim:
        raise wrong(f"variable {x.name!r} has {x.ndim} axes, {real} indices were given")
    if Ellipsis in [i if i is Ellipsis else 0 for i in index]:
        at = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = index[:at] + (slice(None),) * (x.ndim - real) + index[at + 1 :]
    axes: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    steps: list[int] = []
    drop: list[int] = []
    new: list[int] = []
    axis = position = 0
    for i in index:
        if i is None:
            new.append(position)
            position += 1
            continue
        if isinstance(i, slice):
            if (i.start, i.stop, i.step) != (None, None, None):
                step = i.step or 1
                axes.append(axis)
                starts.append(i.start if i.start is not None else (0 if step > 0 else 2**31 - 1))
                ends.append(i.stop if i.stop is not None else (2**31 - 1 if step > 0 else -(2**31)))
                steps.append(step)
            position += 1
        elif isinstance(i, int) and not isinstance(i, bool):
            size = x.shape[axis]
            if size >= 0 and not -size <= i < size:
                raise wrong(f"index {i} is out of range for axis {axis} of variable {x.name!r} with shape {list(x.shape)}")
            axes.append(axis)
            starts.append(i)
            ends.append(i + 1 if i != -1 else 2**31 - 1)
            steps.append(1)
            drop.append(axis)
        else:
            raise wrong(f"variable {x.name!r} can be indexed with integers, slices, None and ...; got {type(i).__name__}")
        axis += 1
    b = x._build()
    y = x
    if axes:
        if all(s == 1 for s in steps):
            y = b.slice(y, axes=axes, starts=starts, ends=ends)
        else:
            y = b.strided_slice(y, axes=axes, starts=starts, ends=ends, strides=steps)
    if drop:
        y = b.squeeze(y, axes=drop)
    if new:
        y = b.unsqueeze(y, axes=new)
    return y
