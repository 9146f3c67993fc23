"""Which open axes have one size: types inferred once more, with a number standing for every size that the feed decides.

An open axis only says that its size is not known yet. Two of them may be equal (`h` and `relu(h)`) or not (`h` and `h[0:1]`), and where a
program broadcasts, its gradient must know which. The batch, axis 0 of every data variable, has one size for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .errors import ProgramError
from .opdef import OPS
from .operator import Operator
from .types import ANY, TensorType

if TYPE_CHECKING:
    from .program import Block
    from .variable import Variable

# Divisible by what models divide by, and too large to equal a size that is written in a program.
_UNIT = 720720
_BATCH = _UNIT * 1_000_003


class Sizes:
    """Stand-in shapes of the variables of a block, worked out when asked for.

    >>> from fluidx.ir import Builder, Program
    >>> x = Program("p").global_block().create_var("x", [-1, 4], "float32", is_data=True)
    >>> b = Builder(x.block)
    >>> sizes = Sizes(x.block)
    >>> sizes.equal(x, b.relu(x)), sizes.equal(x, b.slice(x, axes=[0], starts=[0], ends=[1]))
    (True, False)
    """

    def __init__(self, block: Block):
        self.block = block
        self._known: dict[str, tuple[int, ...]] = {}
        self._writer: dict[str, Operator] = {}
        self._seen: dict[int, int] = {}  # block -> operators that `_writer` knows
        self._others = 0

    def equal(self, a: Variable, b: Variable, stop: int | None = None) -> bool:
        """Whether two variables have one shape (up to axis `stop`), whatever is fed. False where that cannot be told."""
        declared = a.shape[:stop]
        return declared == b.shape[:stop] and (ANY not in declared or self.shape(a.name)[:stop] == self.shape(b.name)[:stop])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable, numbers standing for its open sizes: equal numbers, equal sizes."""
        known, waiting, begun = self._known, [name], set()
        while waiting:
            n = waiting[-1]
            if n not in known:
                declared = self.block.desc(n).type.shape
                op = self._producer(n) if ANY in declared else None
                missing = [m for m in op.input_arg_names if m not in known and m not in begun] if op else ()
                if missing:
                    begun.add(n)
                    waiting += missing
                    continue
                found = _infer(op, self._dtype, known).get(n, declared) if op else declared
                # what is still open has a size of its own
                known[n] = tuple(self._open(n, axis) if size == ANY else size for axis, size in enumerate(found))
            waiting.pop()
        return known[name]

    def _dtype(self, name: str) -> str:
        return self.block.desc(name).type.dtype

    def _open(self, name: str, axis: int) -> int:
        if axis == 0 and self.block.desc(name).is_data:
            return _BATCH
        self._others += 1
        return _BATCH + 2 * _UNIT * self._others

    def _producer(self, name: str) -> Operator | None:
        """The operator that first writes `name`, unless its result is fed or comes out of a sub-block."""
        if self.block.desc(name).is_data:
            return None
        block: Block | None = self.block
        while name not in self._writer and block is not None:
            for op in block.oplist[self._seen.get(block.idx, 0) :]:
                for n in op.output_arg_names:
                    self._writer.setdefault(n, op)
            self._seen[block.idx] = len(block.oplist)
            block = block.parent
        writer = self._writer.get(name)
        return writer if writer is not None and name not in writer.input_arg_names and not writer.sub_blocks() else None


def _infer(op: Operator, dtype_of: Callable[[str], str], known: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What the operator's own type rule makes of the stand-ins; nothing for sizes that it refuses."""
    definition = OPS.get(op.type)
    if definition is None or any(n not in known for n in op.input_arg_names):
        return {}
    try:
        types = {slot: [TensorType(dtype_of(n), known[n]) for n in names] for slot, names in op.inputs.items()}
        results = definition.infer_outputs(types, op.attrs)
    except ProgramError:
        return {}
    found = {}
    for slot, result in zip(definition.out_slots, results, strict=True):
        for n, t in zip(op.outputs.get(slot.name, ()), result if slot.many else (result,), strict=False):
            found[n] = t.shape
    return found
