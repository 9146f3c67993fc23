"""Write operators by calling them: `b.matmul(x, y, transpose_x=True)`. Layers, gradients and passes all build this way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from . import unique_name
from .block import Block, names_of
from .errors import nearest
from .opdef import opdef
from .operator import Operator, Role
from .sizes import StandInShapes
from .source_location import Site, wrong


class Builder:
    """Appends operators to one block and hands back their outputs.

    Arguments follow the op's input slots (a list for a "X*" slot, None for an absent one), attributes are keywords.
    `name=` names the first output, `suffix=` after the first operand: `w@GRAD.shard`; `out={"Slot": variable or name, or a list of them}`
    directs outputs, None leaves an optional one away.
    The result is one Variable, or a tuple in slot order (absent ones None, a list for a "X*" slot).
    """

    def __init__(self, block: Block, role: Role | None = None, role_var: tuple[str, ...] = ()):
        self.block = block
        self.role = role
        self.role_var = role_var
        self.site: Site | None = None  # of the operators; the calling line where it is not set
        self.device: str | None = None  # of the operators; the program's where it is not set

    @cached_property
    def sizes(self) -> StandInShapes:
        """Which open axes of the block's variables have one size."""
        return StandInShapes(self.block)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(op_type)
        method = self.__dict__[op_type] = partial(self.emit, op_type)  # found at once the next time
        return method

    def emit(
        self,
        op_type: str,
        *args: Any,
        name: str | None = None,
        suffix: str = "",
        out: Mapping[str, Any] | None = None,
        n_out: int = 0,
        **attrs: Any,
    ) -> Any:
        """Append `op_type` and return its outputs. `n_out` is the number of names for a "X*" output."""
        definition = opdef(op_type)
        in_slots, out_slots = definition.in_slots, definition.out_slots
        if len(args) > len(in_slots):
            raise wrong(f"op {op_type} takes {len(in_slots)} inputs ({', '.join(definition.inputs)}), got {len(args)}")
        inputs: dict[str, tuple[str, ...]] = {}
        outputs: dict[str, tuple[str, ...]] = {}
        for (slot, _, _), arg in zip(in_slots, args):
            if names := names_of(arg):
                inputs[slot] = names
        if suffix:
            name = f"{next(iter(inputs.values()))[0]}.{suffix}"
        directed = 0
        for k, (slot, _, many) in enumerate(out_slots):
            if out is not None and slot in out:
                directed += 1
                if names := names_of(out[slot]):
                    outputs[slot] = names
            elif many:
                base = name or self._fresh(f"{op_type}.tmp", ".0")
                outputs[slot] = tuple([f"{base}.{i}" for i in range(n_out)])
            elif k == 0 and name:
                outputs[slot] = (name,)
            else:
                outputs[slot] = (self._fresh(f"{op_type}.{slot.lower()}" if k else f"{op_type}.tmp"),)
        if out and directed < len(out):
            known = [s.name for s in out_slots]
            given = next(slot for slot in out if slot not in known)
            raise wrong(f"op {op_type} has no output {given!r}; {nearest(given, known, 'it has')}")
        op = self._write(op_type, inputs, outputs, attrs)
        results = [self._result(op, slot, many) for slot, _, many in out_slots]
        return results[0] if len(results) == 1 else tuple(results)

    def _write(
        self, op_type: str, inputs: dict[str, tuple[str, ...]], outputs: dict[str, tuple[str, ...]], attrs: Mapping[str, Any]
    ) -> Operator:
        """Append the operator, and declare its results."""
        return self.block.write(op_type, inputs, outputs, attrs, self.role, self.role_var, self.site, self.device)

    def _fresh(self, key: str, first: str = "") -> str:
        """A name that no variable has; with `first`, one that none has with that ending."""
        declares = self.block.program.declares
        return unique_name.generate(key, (lambda name: declares(name + first)) if first else declares)

    def _result(self, op: Operator, slot: str, many: bool) -> Any:
        names = op.outputs.get(slot)
        if many:
            return [self.block.var(n) for n in names or ()]
        return self.block.var(names[0]) if names else None
