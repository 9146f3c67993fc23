"""Executor: run a program on one device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..ir.defaults import default_main_program
from ..ir.errors import ExecutionError, FeedError
from ..ir.program import Program
from .bind import prepare
from .bound import Bound
from .context import RunContext
from .cut import Cut
from .feeds import check_feed, check_fetch, check_sizes, feed_types, fetch_names, sizes_of
from .outline import Outline
from .place import CPUPlace, Place, array_module, using
from .scope import Scope, global_scope
from .segments import segments
from .watch import asked, listeners, look, tell

_MAX_PLANS = 32  # plans kept by one executor; a plan holds its buffers
_MAX_SEGMENTS = 128  # plans of segments of programs that are cut
T = TypeVar("T")


class _Kept(OrderedDict[tuple, tuple[T, int, tuple]]):
    """What was made for runs, by what it was made for; what was not asked for longest goes."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def find(self, key: tuple, scope: Scope) -> T | None:
        """What is kept; None where arrays of the scope are others by now."""
        found = self.get(key)
        if found is None or found[1] != scope.version:
            return None
        self.move_to_end(key)
        return found[0]

    def keep(self, key: tuple, made: T, scope: Scope, source: Any) -> T:
        self[key] = made, scope.version, (source, scope)  # the references keep ids from being reused
        if len(self) > self.most:
            self.popitem(last=False)
        return made


class Executor:
    """Runs programs on one device. Plans are made once per program version, feed shapes and fetch list, and reused.

    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     x = fx.data("x", [-1, 2], "float32")
    ...     y = fx.layers.scale(x, scale=2.0)
    >>> exe = fx.Executor(fx.CPUPlace())
    >>> exe.run(main, feed={"x": np.ones((1, 2), "float32")}, fetch_list=[y])[0].tolist()
    [[2.0, 2.0]]
    """

    def __init__(self, place: Place | None = None):
        self.place = place or CPUPlace()
        self._xp = array_module(self.place)
        self._ready: _Kept[Bound | Cut] = _Kept(_MAX_PLANS)
        self._segments: _Kept[Bound] = _Kept(_MAX_SEGMENTS)
        self._closed = False
        self._lock = threading.RLock()  # a plan's buffers serve one run at a time

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Any = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = True,
        return_merged: bool = True,
        use_prune: bool = False,
    ) -> list[Any]:
        """Run the program once and return the fetched values, one NumPy array each.

        `feed` maps names to arrays whose axis 0 is the batch where the variable was declared with -1. Operators whose results
        nothing needs do not run. `return_numpy=False` leaves values on the device. The remaining arguments are fluid's and
        have no effect: plans are always cached, there is one value per fetch. Calls from several threads wait for one another.

        Raises FeedError (missing, unknown or misshaped feed or fetch), NotInitializedError (startup not run), ExecutionError
        (an operator failed, or FLUIDX_CHECK_NAN found a NaN), each naming the operator and the line that wrote it.
        """
        if self._closed:
            raise ExecutionError("this executor is closed; make a new one")
        program = program if program is not None else default_main_program()
        if not isinstance(program, Program):
            raise FeedError(f"run takes a Program, got {type(program).__name__}")
        if program.rank is not None and program.world_size > 1:
            raise ExecutionError(
                f"{program.label()} is rank {program.rank} of {program.world_size}; run all ranks together: "
                "ParallelExecutor(transpiler, places=...)"
            )
        scope = scope or global_scope()
        arrays = check_feed(program, feed)
        names = fetch_names(fetch_list)
        with self._lock, using(self.place):
            watched = asked()
            ready = self._made_ready(program, arrays, names, scope, fuse=not watched.apart)
            ready.ctx.step = scope.steps.get(program, 0)
            values = ready.run(arrays, watched) if isinstance(ready, Cut) else ready.run(arrays, look(ready, watched))
            scope.steps[program] = ready.ctx.step + 1
            if listeners:
                tell(program.name, ready.ctx.step, names, values)
            return values if not return_numpy or self._xp is np else [_to_numpy(self._xp, v) for v in values]

    def _made_ready(self, program: Program, arrays: Mapping[str, Any], names: list[str], scope: Scope, fuse: bool) -> Bound | Cut:
        key = (id(program), program.version, id(scope), tuple(names), sizes_of(arrays), fuse)
        found = self._ready.find(key, scope)
        if found is not None:
            return found
        check_fetch(program, names)
        check_sizes(program.global_block().descs, arrays)
        types = feed_types(program, arrays)
        outline = Outline.of(program, types, names)
        cut = outline.fact(segments)
        ctx = RunContext(groups=dict.fromkeys(program.groups, (0,)), turns=program.turns)
        if program.groups:
            from ..comm.threads import ThreadWorld

            ctx.comm = ThreadWorld(1).communicator(0)
        if not cut:
            bound = prepare(program, types, names, scope, ctx, self._xp, fuse, outline=outline)
            return self._ready.keep(key, bound, scope, program)

        def segment(planned: Outline, given: tuple, make: Callable[[], Bound]) -> Bound:
            key = (id(planned), id(scope), given, fuse)
            return self._segments.find(key, scope) or self._segments.keep(key, make(), scope, planned)

        return self._ready.keep(key, Cut(program, cut, names, scope, ctx, self._xp, fuse, segment), scope, program)

    def close(self) -> None:
        """Drop plans and their buffers; the executor cannot run afterwards."""
        self._ready.clear()
        self._segments.clear()
        self._closed = True


def _to_numpy(xp: Any, value: Any) -> Any:
    """A value of which arrays may lie on a device; only the host has lists, dicts and None."""
    return value if value is None or isinstance(value, (list, dict)) else xp.asnumpy(value)
