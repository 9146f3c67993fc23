"""Which open axes have equal sizes: types are inferred again with a stand-in number for every size that the feed decides.

An open axis only says that its size is not known yet. Two of them may be equal (`h` and `relu(h)`) or not (`h` and `h[0:1]`), and where a
program broadcasts, its gradient must know which. Axes of one name have one size; so has the batch, axis 0 of every data variable whose
axis 0 has no name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING

from .errors import ProgramError
from .opdef import OPS
from .operator import Operator
from .sub_blocks import runs_bodies
from .types import ANY, Dim, TensorType

if TYPE_CHECKING:
    from .program import Block
    from .variable import Variable

# Divisible by common divisors in models, and too large to be equal to a size in a program. No number is a multiple of another, and since
# they are drawn, a sum of some is no sum of others.
_UNIT = 720720
_BATCH = _UNIT * 2_097_169


def _drawn(k: int) -> int:
    """The number that stands for unknown size k."""
    return _UNIT * ((1 << 21) + (int.from_bytes(blake2b(b"%d" % k, digest_size=4).digest(), "big") >> 11) | 1)


class StandInShapes:
    """Stand-in shapes of the variables of a block, computed on demand.

    >>> from fluidx.ir import Builder, Program
    >>> x = Program("p").global_block().create_var("x", [-1, 4], "float32", is_data=True)
    >>> b = Builder(x.block)
    >>> sizes = StandInShapes(x.block)
    >>> sizes.equal(x, b.relu(x)), sizes.equal(x, b.slice(x, axes=[0], starts=[0], ends=[1]))
    (True, False)
    """

    def __init__(self, block: Block):
        self.block = block
        self._known: dict[str, TensorType] = {}
        self._writer: dict[str, Operator] = {}
        self._seen: dict[int, int] = {}  # block -> operators that `_writer` knows
        self._named: dict[str, int] = {}
        self._others = count(1)
        self._letters: dict[tuple[tuple[str, ...], str], int] = {}  # of results of an operator, sizes that values decide

    def inside(self, block: Block) -> StandInShapes:
        """The stand-in shapes of a block within this one; a number stands for the same size in both."""
        inner = copy(self)
        inner.block = block
        return inner

    def renamed(self, names: Mapping[str, str]) -> None:
        """Rename variables, old name to new one. Their numbers stay the same."""
        for old, new in names.items():
            if old in self._known:
                self._known[new] = self._known.pop(old)
        self._letters = {(tuple([names.get(n, n) for n in made]), letter): size for (made, letter), size in self._letters.items()}
        self._writer.clear()
        self._seen.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget variables that were removed together with the operators that wrote them."""
        for n in names:
            self._known.pop(n, None)
        self._writer.clear()
        self._seen.clear()

    def equal(self, a: Variable, b: Variable, stop: int | None = None) -> bool:
        """Do two variables have equal shapes (up to axis `stop`) for every feed? False if that is not known."""
        declared = a.shape[:stop]
        return declared == b.shape[:stop] and (ANY not in declared or self.shape(a.name)[:stop] == self.shape(b.name)[:stop])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable, numbers standing for its open sizes: equal numbers, equal sizes."""
        known, desc = self._known, self.block.desc
        if name in known:
            return known[name].shape
        waiting, begun = [name], set()
        while waiting:
            n = waiting[-1]
            if n not in known:
                declared = desc(n).type
                if declared.__class__ is not TensorType:  # it has no axes that could be equal to others
                    known[n] = declared
                    continue
                op = self._producer(n) if ANY in declared.shape else None
                if op is not None and n not in begun:
                    begun.add(n)
                    missing = [m for m in op.input_arg_names if m not in known and m not in begun]
                    if missing:
                        waiting += missing
                        continue
                self._note(n, self._infer(op).get(n, declared) if op is not None else declared)
            waiting.pop()
        return known[name].shape

    def changed(self, names: Iterable[str], body: Block) -> list[str]:
        """The variables of the block whose sizes a sub-block may change."""
        before = {n: self.shape(n) for n in names}
        inside = self.inside(body)
        writers = {n: op for op in body.oplist for n in op.output_arg_names if n in before}
        for op in writers.values():
            for n in op.input_arg_names:
                inside.shape(n)
        return [n for n, op in writers.items() if not runs_bodies(op) and inside._infer(op).get(n, self._known[n]).shape != before[n]]

    def filled(self, t: TensorType, axes: Sequence[tuple[str, int, int]]) -> TensorType:
        """A type with the sizes of its open axes: what is fed, an axis of it, and how often its size goes into the open one."""
        return with_open_axes(t, axes, self.shape)

    def multiple(self, name: str, fed: Iterable[str]) -> tuple[str, tuple[int, ...]] | None:
        """The first of what is fed whose open axes go into those of a variable: its name, and for each which axis and how often."""
        for data in fed:
            sizes = [(axis, size) for axis, size in enumerate(self.shape(data)) if self.block.desc(data).type.shape[axis] == ANY]
            found = [next(((axis, size // one) for axis, one in sizes if size % one == 0), None) for size in self._opened(name)]
            if all(found):
                return data, tuple(n for pair in found if pair is not None for n in pair)
        return None

    def _opened(self, name: str) -> list[int]:
        return [size for d, size in zip(self.block.desc(name).type.shape, self.shape(name), strict=True) if d == ANY]

    def _note(self, name: str, found: TensorType) -> None:
        if ANY in found.shape:  # what is still open has a size of its own
            found = found.with_shape(self._open(name, axis, size) if size == ANY else size for axis, size in enumerate(found.shape))
        self._known[name] = found

    def _open(self, name: str, axis: int, size: int) -> int:
        if size.__class__ is Dim:
            return self._named.get(size.name) or self._named.setdefault(size.name, self.another())
        desc = self.block.desc(name)
        return _BATCH if axis == 0 and desc.is_data and not desc.attrs.get("resized") else self.another()

    def another(self) -> int:
        """A new stand-in number, for an unknown size."""
        return _drawn(next(self._others))

    def _producer(self, name: str) -> Operator | None:
        """The operator that first writes `name`, unless its result is fed, comes out of a sub-block, or does not keep its sizes."""
        if (desc := self.block.desc(name)).is_data or desc.attrs.get("resized"):
            return None
        block: Block | None = self.block
        while name not in self._writer and block is not None:
            for op in block.oplist[self._seen.get(block.idx, 0) :]:
                for n in op.output_arg_names:
                    self._writer.setdefault(n, op)
            self._seen[block.idx] = len(block.oplist)
            block = block.parent
        writer = self._writer.get(name)
        return writer if writer is not None and name not in writer.input_arg_names and not runs_bodies(writer) else None

    def _infer(self, op: Operator) -> dict[str, TensorType]:
        """Apply the operator's type rule to the stand-in shapes; nothing for sizes that it refuses."""
        definition = OPS.get(op.type)
        if definition is None or any(n not in self._known for n in op.input_arg_names):
            return {}
        if definition.control.open_axes is not None:
            return {n: self.filled(self.block.desc(n).type, definition.control.open_axes(op.attrs)) for n in op.output_arg_names}
        try:
            args = definition.arrange(op.inputs, value=self._known.__getitem__)
            results = self.block.program.infer(definition, args, op.attrs)
        except ProgramError:
            return {}
        if len(definition.out_slots) == 1:
            results = (results,)
        if definition.control.sized_by_values:
            results = self._lettered(op.output_arg_names, definition.control.sized_by_values, results)
        found: dict[str, TensorType] = {}
        for slot, result in zip(definition.out_slots, results, strict=True):
            found.update(zip(op.outputs.get(slot.name, ()), result if slot.many else (result,)))
        return found

    def _lettered(self, names: tuple[str, ...], words: Sequence[str], results: Sequence[TensorType]) -> list[TensorType]:
        """The results of an operator, whose open axes have sizes that values decide: one number for each letter."""
        made = []
        for word, t in zip(words, results, strict=True):
            letters = iter(word)
            made.append(t.with_shape(self._letter(names, next(letters, "")) if d == ANY else d for d in t.shape))
        return made

    def _letter(self, names: tuple[str, ...], letter: str) -> int:
        key = names, letter
        if letter and key not in self._letters:
            self._letters[key] = self.another()
        return self._letters[key] if letter else ANY


def with_open_axes(t: TensorType, axes: Sequence[tuple[str, int, int]], shape: Callable[[str], Sequence[int]]) -> TensorType:
    """A type whose open axes have sizes, as an op's `open_axes` gives them; `shape` is that of what is fed.

    Raises ProgramError where there is no such axis.
    """
    sizes = []
    for name, axis, times in axes:
        fed = shape(name)
        if axis >= len(fed):
            raise ProgramError(f"axis {axis} of {name!r} is asked for, which has {len(fed)}")
        sizes.append(times * fed[axis])
    if len(sizes) != t.shape.count(ANY):
        raise ProgramError(f"{t} has {t.shape.count(ANY)} open axes, and {len(sizes)} sizes are given")
    rest = iter(sizes)
    return t.with_shape(next(rest) if d == ANY else d for d in t.shape)
