"""Write operators by calling them: `b.matmul(x, y, transpose_x=True)`. Layers, gradients and passes all build this way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from . import unique_name
from .errors import ProgramError, nearest
from .opdef import opdef
from .operator import Operator, Role
from .program import Block
from .site import wrong
from .sizes import Sizes


class Builder:
    """Appends operators to one block and hands back their outputs.

    Arguments follow the op's input slots (a list for a "X*" slot, None for an absent one), attributes are keywords.
    `name=` names a single output; `out={"Slot": variable or name, or a list of them}` directs outputs, None leaves an optional one away.
    The result is one Variable, or a tuple in slot order (absent ones None, a list for a "X*" slot).
    """

    def __init__(self, block: Block, role: Role | None = None, role_var: tuple[str, ...] = ()):
        self.block = block
        self.role = role
        self.role_var = role_var

    @cached_property
    def sizes(self) -> Sizes:
        """Which open axes of the block's variables have one size."""
        return Sizes(self.block)

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
        for slot_name in out:
            if slot_name not in (s.name for s in definition.out_slots):
                known = [s.name for s in definition.out_slots]
                raise wrong(f"op {op_type} has no output {slot_name!r}; {nearest(slot_name, known, 'it has')}")
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
        op = self.block.append_op(op_type, inputs, outputs, attrs, role=self.role, role_var=self.role_var)
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
