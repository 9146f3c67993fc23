"""Regions of a program that one operator replaces, and their gradient operators, which are found in the program by search.

No pass has to know how a chain is differentiated. The gradient operators that backward would write for the region are written again, and
the program is searched for the same operators under any names. If no other operator reads the values of the chain, the gradients of the one
operator can replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backward import gradients
from ..ir import unique_name
from ..ir.builder import Builder
from ..ir.errors import ProgramError
from ..ir.operator import Operator
from ..ir.program import Block
from ..ir.unique_name import unused
from ..ir.var import Var
from .values import ChainValues

Use = Callable[[str], str]  # maps an input of a region to the name under which it is read
Write = Callable[[Builder, Use], object]


@dataclass(frozen=True)
class Region:
    """Operators, by ascending index; the last one makes `out`, and they read `inputs` and constants. Their replacement also makes the
    values in `kept`; then it is placed at the first of them, else at the last.
    """

    ops: tuple[int, ...]
    out: str
    inputs: tuple[str, ...]
    kept: tuple[str, ...] = ()

    @property
    def at(self) -> int:
        return self.ops[0] if self.kept else self.ops[-1]


@dataclass(frozen=True)
class Written:
    """Operators that make `out` from the inputs, and their gradients. `terms` are pairs (input, gradient term), one for each time that the
    input is read; `seed` is the gradient of `out`.
    """

    forward: list[Operator]
    backward: list[Operator]
    terms: list[tuple[str, str]]
    seed: str
    descs: Mapping[str, Var]

    def without_copies(self) -> Written:
        """The same without copies of gradients. Backward copies a gradient if an input receives it unchanged; it makes no copy if that is
        one term of a sum."""
        ends = {t for _, t in self.terms}
        copied = {op.output_arg_names[0]: op.input_arg_names[0] for op in self.backward if op.type == "assign"}
        copied = {t: x for t, x in copied.items() if t in ends}
        ops = [op for op in self.backward if copied.keys().isdisjoint(op.output_arg_names)]
        return replace(self, backward=ops, terms=[(n, copied.get(t, t)) for n, t in self.terms])

    @property
    def made(self) -> list[str]:
        """The names that the gradient operators write."""
        return [n for op in self.backward for n in op.output_arg_names]


def as_it_is(values: ChainValues, region: Region) -> Write:
    """Writes the operators of the region."""

    def write(b: Builder, use: Use) -> None:
        for k in region.ops:
            op = values.ops[k]
            ins = {slot: tuple([use(n) if n in region.inputs else n for n in names]) for slot, names in op.inputs.items()}
            b.block.repeat(op, ins, op.outputs)

    return write


def written(values: ChainValues, region: Region, write: Write, wanted: Sequence[str] = (), seed: str = "") -> Written:
    """The operators that `write` writes after the operators before the region's end, and the gradients of the inputs `wanted`. `seed` is
    the gradient of `out`, a new variable by default. Raises ProgramError if there is no gradient, or if types do not match.
    """
    draft = values.program.copy()
    block, inside, last = draft.global_block(), set(region.ops), values.ops[region.ops[-1]]
    block.oplist = [op for k, op in enumerate(values.ops[: region.ops[-1]]) if k not in inside]
    b = Builder(block, role=last.role)
    b.site, b.device = last.site, last.device
    reads: list[tuple[str, str]] = []  # (input, its copy that one operator reads): each copy has its own gradient

    def use(name: str) -> str:
        if name not in wanted:
            return name
        copy = fresh(block, f"{name}@USE")
        block.descs[copy] = values.descs[name].changed(name=copy, persistable=False, is_data=False, is_parameter=False, attrs={})
        b.assign(block.var(name), name=copy)
        reads.append((name, copy))
        return copy

    with unique_name.guard():
        start = len(block.oplist)
        write(b, use)
        back = {copy: name for name, copy in reads}
        forward = [op.renamed(back) for op in block.oplist[start:] if back.keys().isdisjoint(op.output_arg_names)]
        if not reads:
            return Written(forward, [], [], "", block.descs)
        if not seed:
            seed = fresh(block, f"{region.out}@GRAD@SEED")
            block.descs[seed] = Var(seed, values.descs[region.out].type)
        stop = len(block.oplist)
        terms = _terms(block, region.out, reads, seed)
    return Written(forward, [op.renamed(back) for op in block.oplist[stop:]], terms, seed, block.descs)


def _terms(block: Block, out: str, reads: Sequence[tuple[str, str]], seed: str) -> list[tuple[str, str]]:
    found = gradients([block.var(out)], [block.var(copy) for _, copy in reads], [block.var(seed)])
    terms = []
    for (name, _), g in zip(reads, found, strict=True):
        if g is None:
            raise ProgramError(f"no gradient flows to %{name}")
        terms.append((name, g.name))
    return terms


def fresh(block: Block, name: str) -> str:
    return unused(name, block.descs, "_".__mul__)


def found_in(values: ChainValues, own: Written) -> Iterator[tuple[dict[str, str], set[int]]]:
    """The places of the gradient operators in the program: their names there, and their indices."""
    new = {own.seed, *own.made}
    ops, makers, uses = values.ops, values.makers, values.uses

    def anchors(op: Operator, names: Mapping[str, str]) -> Sequence[int] | None:
        """The candidates for an operator, by the names that are known: the maker of its result, or the readers of an operand."""
        for n in op.output_arg_names:
            if n in names:
                return makers.get(names[n], ())
        at = [uses.get(names.get(n, n), ()) for n in op.input_arg_names if n in names or n not in new]
        return min(at, key=len) if at else None

    def search(left: list[Operator], names: dict[str, str], at: dict[int, int]) -> Iterator[tuple[dict[str, str], set[int]]]:
        if not left:
            yield names, set(at)
            return
        choices = [(len(ks), j, ks) for j, op in enumerate(left) if (ks := anchors(op, names)) is not None]
        if not choices:
            return
        _, j, ks = min(choices)
        for k in ks:
            if k not in at and (more := _same(left[j], ops[k], names, new)) is not None:
                yield from search(left[:j] + left[j + 1 :], more, {**at, k: j})

    return search(list(own.backward), {}, {})


def _same(wanted: Operator, op: Operator, names: Mapping[str, str], new: set[str]) -> dict[str, str] | None:
    """`names` extended so that `op` equals `wanted`; None if they do not match."""
    if (op.type, op.role, op.device) != (wanted.type, wanted.role, wanted.device) or op.attrs != wanted.attrs:
        return None
    found = dict(names)
    for mine, theirs in ((wanted.inputs, op.inputs), (wanted.outputs, op.outputs)):
        if mine.keys() != theirs.keys() or any(len(mine[slot]) != len(theirs[slot]) for slot in mine):
            return None
        for slot in mine:
            for a, b in zip(mine[slot], theirs[slot], strict=True):
                if (found.setdefault(a, b) if a in new else a) != b:
                    return None
    return found
