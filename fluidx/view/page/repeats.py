"""Repeated patterns of operators: stretches of equal structure are folded into groups, such as the blocks of a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ...ir.program import Block
from .operator_group import COPY, REPEAT, SECTIONS, Item, OperatorGroup

Touched = Sequence[tuple[Sequence[str], Sequence[str]]]  # for each operator: the names that it reads, and that it writes


class Repeats:
    """Finds repeated patterns of the operators of a block.

    `from_state`: values computed from state alone. `attached`: by computing operator, itself and the operators attached to it.
    """

    def __init__(self, block: Block, touched: Touched, from_state: AbstractSet[str], attached: Mapping[int, Sequence[int]]):
        self.block, self.ops, self.touched = block, block.oplist, touched
        self.from_state, self.attached = from_state, attached
        self.structures: dict[object, int] = {}
        self.structure_of: dict[int, int] = {}
        self.last_crossing: list[tuple[int, int]] = []  # `crossing` of the items that are being folded, computed at first use

    def fold(self, items: list[Item]) -> list[Item]:
        """Put repeated stretches of items into groups, short patterns first, because a stage has several blocks.

        Cuts that few values cross are tried first. Two values cross inside a residual block, so the block is found before the repeated
        layers in it.
        """
        structures, self.last_crossing = np.array([self._structure(i) for i in items]), []
        for most in (1, 2, 4, len(self.ops)):
            changed = True
            while changed:
                changed, period = False, 1
                while 2 * period <= len(items):
                    found = self._repeats(items, structures, period, most)
                    if found:
                        changed = True
                        items = self._replaced(items, period, found)
                        structures, self.last_crossing = np.array([self._structure(i) for i in items]), []
                    period += 1
        return items

    def _repeats(self, items: list[Item], structures: np.ndarray, period: int, most: int) -> list[tuple[int, int]]:
        """(start, copies) of stretches in which a pattern of `period` items repeats; at most `most` values cross each cut."""
        equal = np.concatenate([[0], (structures[:-period] == structures[period:]).astype(int), [0]])
        edges = np.flatnonzero(np.diff(equal))
        long = edges[1::2] - edges[::2] >= period
        found: list[tuple[int, int]] = []
        end = 0
        for first, last in zip(edges[::2][long].tolist(), edges[1::2][long].tolist()):
            first, last = max(first, end), last + period
            if last - first < 2 * period or not self._is_worth_folding(items[first : first + period], (last - first) // period):
                continue
            crossing = self.last_crossing = self.last_crossing or self.crossing(items)
            best: tuple[tuple[int, int, int], int, int] | None = None
            for start in range(first, min(first + period, last - 2 * period + 1)):
                copies = (last - start) // period
                cuts = [crossing[start + c * period] for c in range(copies + 1)]
                cost = (-copies, sum(n for n, _ in cuts), -sum(r for _, r in cuts))
                if max(n for n, _ in cuts) > most or not self._is_worth_folding(items[start : start + period], copies):
                    continue
                if best is None or cost < best[0]:
                    best = cost, start, copies
            if best is not None:
                found.append(best[1:])
                end = best[1] + best[2] * period
        return found

    def _is_worth_folding(self, pattern: list[Item], copies: int) -> bool:
        if len(pattern) == 1 and isinstance(pattern[0], OperatorGroup) and pattern[0].kind == REPEAT:
            return False
        weight = sum(len(i.ops()) if isinstance(i, OperatorGroup) else 1 for i in pattern)
        return copies >= 4 or copies == 3 and weight >= 4 or weight >= 8

    def crossing(self, items: list[Item]) -> list[tuple[int, int]]:
        """For each position between items: (number of values written before and read after it, number of those reads).

        Parameters and gathered parameters are not counted.
        """
        first: dict[str, int] = {}
        reads: dict[str, list[int]] = {}
        for p, item in enumerate(items):
            for core in item.ops() if isinstance(item, OperatorGroup) else (item,):
                for k in self.attached.get(core, (core,)):
                    for n in self.touched[k][0]:
                        if n in first:
                            reads.setdefault(n, []).append(p)
                    for n in self.touched[k][1]:
                        if n not in self.from_state:
                            first.setdefault(n, p)
        values, readers = [0] * (len(items) + 2), [0] * (len(items) + 2)
        for n, at in reads.items():
            values[first[n] + 1] += 1
            values[max(at) + 1] -= 1
            for p in at:
                readers[first[n] + 1] += 1
                readers[p + 1] -= 1
        return list(zip(np.cumsum(values).tolist(), np.cumsum(readers).tolist()))

    def _structure(self, item: Item) -> int:
        """A number that is equal for items of the same structure. Sizes and attributes are ignored, because stages differ in them."""
        if isinstance(item, int):
            if item not in self.structure_of:
                op = self.ops[item]
                key = (op.type, tuple((s, len(n)) for s, n in op.inputs.items()), tuple((s, len(n)) for s, n in op.outputs.items()))
                self.structure_of[item] = self.structures.setdefault(key, len(self.structures))
            return self.structure_of[item]
        inner = [self._structure(c) for c in (item.children[:1] if item.kind == REPEAT else item.children)]
        return self.structures.setdefault((item.kind == REPEAT, *inner), len(self.structures))

    def _replaced(self, items: list[Item], period: int, found: list[tuple[int, int]]) -> list[Item]:
        out: list[Item] = []
        at = 0
        for start, copies in found:
            out += items[at:start]
            at = start + copies * period
            out.append(self._repeat([items[start + c * period : start + (c + 1) * period] for c in range(copies)]))
        return out + items[at:]

    def _repeat(self, copies: list[list[Item]]) -> OperatorGroup:
        one = copies[0]
        if len(one) == 1 and isinstance(one[0], OperatorGroup):
            titles = [c[0].title for c in copies if isinstance(c[0], OperatorGroup)]
            each = os.path.commonprefix(titles).rstrip("0123456789_-. ") or "group"
            return OperatorGroup(f"{len(copies)} × {each}", REPEAT, [c[0] for c in copies], each)
        if len(one) == 1 and isinstance(one[0], int):
            each = self.ops[one[0]].type
            return OperatorGroup(f"{len(copies)} × {each}", REPEAT, [c[0] for c in copies], each)
        each = self._pattern_name(one)
        marks = [self._parameters_of(c) for c in copies]
        named = len(set(marks)) == len(marks) and all(marks)
        groups: list[Item] = [
            OperatorGroup(f"{each} {k}" + (f" · {marks[k - 1]}" if named else ""), COPY, list(c)) for k, c in enumerate(copies, start=1)
        ]
        return OperatorGroup(f"{len(copies)} × {each}", REPEAT, groups, each)

    def _pattern_name(self, items: list[Item]) -> str:
        if any(isinstance(i, OperatorGroup) and i.kind == REPEAT for i in items):
            return "stage"
        if all(SECTIONS.get(self.ops[k].role, "update") == "update" for k in OperatorGroup("", "", items).ops()):
            return "updates"
        if len(items) <= 3:
            return " + ".join(i.title if isinstance(i, OperatorGroup) else self.ops[i].type for i in items)
        return "block"

    def _parameters_of(self, items: list[Item]) -> str:
        """The common prefix of the names of the parameters that these items read."""
        read = (n for k in OperatorGroup("", "", items).ops() for n in self.ops[k].input_arg_names)
        names = [name for n in read if (name := n.rpartition(".")[0] if n in self.from_state else n) and self._is_parameter(name)]
        return os.path.commonprefix(names).rstrip("._- ") if len(set(names)) > 1 else ""

    def _is_parameter(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and d.is_parameter
