"""The program that an import writes: its blocks, the names of its variables, and how to take operators back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..ir import Builder, Program, Role, TensorType, Variable
from ..ir.dtypes import np_dtype
from ..ir.types import ANY
from ..ir.unique_name import UnusedNames
from .limits import checked_shape

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.@/\-]")


def valid_name(name: str) -> str:
    """A name of a model with _ for the characters that names of variables cannot have."""
    return _NOT_IN_NAMES.sub("_", name)


class Mark(NamedTuple):
    """The state of a block, to go back to: its number of operators, its names, the number of blocks, and the variables of known values."""

    ops: int
    names: frozenset[str]
    blocks: int
    made: dict[int, tuple[Any, Variable]]


class ProgramWriter:
    """Writes operators into `main` with the builder `b`; `startup` fills the state variables."""

    def __init__(self, main: Program, startup: Program):
        self.main, self.startup = main, startup
        self.b = Builder(main.global_block(), role=Role.FORWARD)
        self._unused = UnusedNames(main.declares, "_{}".format)  # unrolled rounds repeat a name many times
        self._made: dict[int, tuple[Any, Variable]] = {}  # id of a known value -> the value, kept alive, and its variable
        self._fixed: set[str] = set()  # variables that are referred to outside of `env`: their names must not change

    def fresh(self, name: str) -> str:
        """A name for a variable of the program, from a name of the model."""
        return self._unused(valid_name(name) or "value")

    def with_model_names(self, names: Sequence[str], outputs: list[Any], start: int) -> list[Any]:
        """The outputs of a node, with variables that operators from `start` on write renamed to the names of the model."""
        block = self.b.block
        written = {n for op in block.oplist[start:] for n in op.output_arg_names} - self._fixed
        new_names: dict[str, str] = {}
        for name, value in zip(names, outputs):
            if name and isinstance(value, Variable) and value.name in written and value.name not in new_names:
                new_names[value.name] = name if name == value.name else self.fresh(name)
        if not new_names:
            return outputs
        block.oplist[start:] = [op.renamed(new_names, outputs=True) for op in block.oplist[start:]]
        for old, new in new_names.items():
            block.descs[new] = block.descs.pop(old).changed(name=new)
        self._fixed.update(new_names.values())  # a list may hold the variable by now, and the first name that a node gives stays
        self.b.sizes.renamed(new_names)
        return [block.var(new_names.get(v.name, v.name)) if isinstance(v, Variable) else v for v in outputs]

    def keep_names(self, variables: Sequence[Variable]) -> None:
        """Do not rename these variables later."""
        self._fixed.update(v.name for v in variables)

    def mark(self) -> Mark:
        """The present state of the current block, for `undo`."""
        block = self.b.block
        return Mark(len(block.oplist), frozenset(block.descs), self.main.num_blocks, dict(self._made))

    def undo(self, mark: Mark) -> None:
        """Remove what was written into the current block since `mark`, and later sub-blocks. State variables stay: others may read them."""
        block = self.b.block
        del block.oplist[mark.ops :]
        self.main.drop_blocks(mark.blocks)
        gone = [n for n, d in block.descs.items() if n not in mark.names and not d.persistable]
        for n in gone:
            del block.descs[n]
        self.b.sizes.forget(gone)
        self._made = mark.made | {k: v for k, v in self._made.items() if v[1].persistable}

    def check_sizes(self, start: int = 0) -> None:
        """Raise ProgramError if a result of the operators from `start` on does not fit in memory."""
        block = self.b.block
        for op in block.oplist[start:]:
            for t in (block.descs[name].type for name in op.output_arg_names if name in block.descs):
                if isinstance(t, TensorType):
                    checked_shape([1 if d == ANY else d for d in t.shape], np_dtype(t.dtype).itemsize)
