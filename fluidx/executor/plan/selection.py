"""Outline: the operators that run for given feeds and fetches, with cached facts that all plans of them share, whatever the sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from ... import native
from ...ir.opdef import opdef
from ...ir.operator import Operator, op_types
from ...ir.program import Program
from ...ir.types import TensorType
from ...rewrite.base import Simplified, simplify
from ...rewrite.live import live_ops
from .liveness import check_feeds

if TYPE_CHECKING:
    from .plan_cache import KeptPlan

_MOST = 64  # cache entries of one program
P = ParamSpec("P")
T = TypeVar("T")


class Outline:
    """The operators of block 0 that run, in order, if `given` is fed and `fetch` is fetched."""

    def __init__(self, program: Program, ops: Sequence[Operator], given: tuple[str, ...], fetch: tuple[str, ...]):
        self.program, self.ops, self.given, self.fetch = program, ops, given, fetch
        self.runs_blocks = any(opdef(type_).control.bodies for type_ in op_types(ops))
        self._source = program.version, tuple(program.global_block().oplist)
        self._facts: dict[tuple[Hashable, ...], object] = {}
        self.chains: dict[tuple[Hashable, ...], bool] = {}  # cached: are there kernel calls for a chain?
        self.plans: dict[Hashable, KeptPlan] = {}
        self._simplified: dict[Hashable, tuple[Simplified, Outline]] = {}

    @staticmethod
    def of(program: Program, feed_types: Mapping[str, TensorType], fetch: Sequence[str]) -> Outline:
        """The outline for these feeds and fetches. Raises FeedError for an undeclared feed, and for data that is read but not fed."""
        given, names = tuple(feed_types), tuple(fetch)
        found = program.notes.get((Outline, given, names))
        if found is None or not found._is_current():
            ops = live_ops(program, given, names)
            check_feeds(program, ops, feed_types, names)
            if len(program.notes) >= _MOST:
                program.notes.clear()
            found = program.notes[Outline, given, names] = Outline(program, ops, given, names)
        return found

    def _is_current(self) -> bool:
        """Is the program unchanged?"""
        (version, was), now = self._source, self.program.global_block().oplist
        return version == self.program.version and len(was) == len(now) and all(map(is_, was, now))

    def simplified(self, types: Mapping[str, TensorType], natively: bool | None) -> tuple[Simplified, Outline]:
        """Simpler operators with the same results, bit by bit, for values of these types; and their outline."""
        key = native.chosen() if natively else natively  # constants are computed by these kernels
        known = self._simplified.get(key)
        if known is None or not known[0].holds(types):
            found = simplify(self.program, self.ops, types, self.fetch, self.given, natively)
            left = self if found.ops is self.ops else Outline(self.program, found.ops, self.given, self.fetch)
            known = self._simplified[key] = found, left
        return known

    def fact(self, work: Callable[Concatenate[Outline, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The cached result of `work(outline, *args)`. Arguments must be hashable; the result must not be changed."""
        key = (work, *args)
        if key not in self._facts:
            self._facts[key] = work(self, *args, **kwargs)
        return self._facts[key]  # type: ignore[return-value]
