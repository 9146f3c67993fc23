"""Sharded checkpoints: a folder with a file for each rank, which has its local values, and a manifest with the placements.

The same ranks continue from it bit for bit: it has replica-local values, the number of runs (on which random numbers depend) and the
caller's data. Other ranks, or one device, load the global values. `CheckpointManager` keeps the newest checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ._checks import whole
from ._version import __version__
from .files import state
from .files.atomic import MANIFEST, CheckpointError, Elsewhere, Manifest, Write, manifest_of, place_of, reading, settle, written
from .files.program_text import CONSTANTS, checked_extra, load_constants, parsed, path_of, read_text, save_program
from .files.safetensors import ArrayFile, arrays_in
from .files.save import Made, Save
from .files.state import persistables, program_or_default
from .ir import FluidxError, ParseError, Program, Var
from .ir.jsonform import from_json, to_json
from .ir.parts import coords_of, holds, join

if TYPE_CHECKING:
    from .executor.ranks.state import State

_LOADS = "load a checkpoint"
PARAMETERS_ONLY = "fx.io.load(program, path, executor, var_list=program.all_parameters())"
_PROGRAM = "program.txt"
_STEP = re.compile(r"step-(\d{10,})")


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


# -- saving -------------------------------------------------------------------------------------------------------------------


def save_shards(program: Program | None, folder: Any, executor: Any = None, extra: Mapping[str, Any] | None = None) -> None:
    """Write the local values of `executor`'s ranks into `folder`, a file for each rank; it replaces an older checkpoint there as a whole.
    Ranks that are processes of one script write their own files.

    `program` is the transpiled one. Its persistable variables are saved, and those that its strategy adds. `extra` is JSON data, such as
    the position in the data set; `load_shards` returns it. After a crash there is the older checkpoint or the new one. Raises
    NotInitializedError if a variable has no value, CheckpointError if the folder cannot be written.
    """
    _save(program_or_default(program), path_of(folder), executor, extra).run()


def _save(program: Program, folder: str, executor: Any, extra: Mapping[str, Any] | None, copies: bool = False, **then: Any) -> Save:
    """A Save of a checkpoint. With `copies` it saves the current values, even if they change before it is written."""
    held = state.state_of(executor, program)

    def make() -> Made:
        layout = held.layout()
        files = _files_of_ranks(held, layout, copies)
        about = {
            "fluidx": __version__,
            "world_size": held.world_size,
            "step": held.step,
            "layout": to_json(layout),
            "extra": checked_extra(extra),
        }
        if held.script.is_first:
            text = program.to_string().encode()
            files[_PROGRAM] = lambda stream: stream.write(text)
            if constants := program.constants():
                name = _PROGRAM + CONSTANTS
                files[name] = _content(name, {digest: a.values for digest, a in constants.items()})
        return files, about

    return Save(held.script, folder, make, **then)


def _files_of_ranks(held: State, layout: Program, copies: bool) -> dict[str, Write | Elsewhere]:
    """The files of the ranks' local values. If the executor's ranks are processes, each writes its own."""
    parts, descs = held.parts(), layout.global_block().descs
    background_copies = held.background_copies(f"{__name__}:write_part", {r: list(of) for r, of in parts.items()}, copies)
    files: dict[str, Write | Elsewhere] = {}
    for r, of in parts.items():
        for name in (n for n in of if not descs[n].placement):
            state.checked(descs[name], of[name])
        name, aside = _file_of(r), background_copies.get(r)
        if aside is None:
            files[name] = _content(name, {n: np.array(a) if copies else a for n, a in of.items()})
        else:
            files[name] = Elsewhere(partial(aside.ask, name), _content(name, aside.values), aside.close)
    return files


def write_part(values: Mapping[str, np.ndarray], name: str, path: str) -> dict[str, int]:
    """Write a rank's file in the rank's process; `name` is its final name. Returns its manifest entry."""
    return written(path, _content(name, values))


def _content(name: str, arrays: Mapping[str, np.ndarray]) -> Write:
    """A function that writes arrays. Checksums are computed when it is called."""
    return lambda stream: arrays_in(name, arrays)(stream)


# -- loading ------------------------------------------------------------------------------------------------------------------


class _Shards:
    """An open checkpoint."""

    def __init__(self, folder: str, manifest: Manifest | None, stack: ExitStack):
        self.folder, self.stack = folder, stack
        if manifest is None or "layout" not in manifest.about:
            raise CheckpointError(f"{folder} has no checkpoint: {MANIFEST} is missing, which fx.io.save(..., sharded=True) writes")
        self.manifest, self.about = manifest, manifest.about
        try:
            layout = from_json(self.about["layout"])
            assert isinstance(layout, Program)
            self.layout = layout
        except (ParseError, AssertionError) as e:
            raise CheckpointError(f"{os.path.join(folder, MANIFEST)} is damaged: {e}") from None
        self.ranks = whole("checkpoint", "world_size", self.about.get("world_size"), 1)
        self.coords = [coords_of(layout.groups, r, layout.turns) for r in range(self.ranks)]
        self.files = [stack.enter_context(ArrayFile(self.place(_file_of(r)))) for r in range(self.ranks)]

    def place(self, name: str) -> str:
        return place_of(self.folder, name, self.manifest)

    def var(self, name: str) -> Var | None:
        return self.layout.global_block().descs.get(name)

    def parts(self, name: str) -> dict[int, np.ndarray]:
        """The local values of a variable in the files, by rank."""
        return {r: f.array(name) for r, f in enumerate(self.files) if name in f.names}

    def value(self, name: str) -> np.ndarray:
        """The global value; the mean of a replica-local variable."""
        var, parts = self.layout.global_block().desc(name), self.parts(name)
        if not var.placement:
            return parts[min(parts)]
        firsts: dict[tuple, np.ndarray] = {}
        for r, part in parts.items():
            firsts.setdefault(tuple(self.coords[r].get(e.group, ())[:1] for e in var.placement), part)
        shared = [
            firsts.get(tuple(c.get(e.group, ())[:1] for e in var.placement)) if holds(var.placement, c) else None for c in self.coords
        ]
        try:
            return join(shared, var.placement, self.layout.groups, var.type.shape)
        except (FluidxError, ValueError) as e:
            raise CheckpointError(f"{self.folder}: the parts of variable {name!r} do not fit together: {e}") from None

    def step(self) -> int:
        return whole("checkpoint", "step", self.about.get("step", 0), 0)


def load_shards(program: Program | None, folder: Any, executor: Any = None, only: Sequence[Var] | None = None) -> dict[str, Any]:
    """Load a checkpoint into the persistable variables of `program`, or into `only` some of them, and return its `extra`.

    Ranks with the same groups and placements as the saved ones get their own local values, bit for bit, with the strategy's state. Other
    ranks get their parts of the global values; a strategy's own state starts anew unless its placement is the same. The number of runs
    continues. Everything is checked before anything is set. Raises CheckpointError, which names the file and the variable, if something is
    missing, damaged, or has another shape or dtype.
    """
    program, folder = program_or_default(program), path_of(folder)
    held = state.state_of(executor, program)
    with ExitStack() as stack:

        def opened() -> tuple[_Shards, list[tuple[Var, bool]]]:
            found = _Shards(folder, stack.enter_context(reading(folder, settled=True)), stack)
            return found, list(_wanted(found, program, held.layout(), only))

        state.made_by_all(executor, _LOADS, lambda: settle(folder))
        shards, wanted = state.made_by_all(executor, _LOADS, opened)
        stack.enter_context(held.script.loading())
        for var, alike in wanted:
            if alike:
                held.set_parts(var.name, shards.parts(var.name))
            else:
                held.set_state(var.name, shards.value(var.name))
        if only is None:
            held.step = shards.step()
        return dict(shards.about.get("extra") or {})


def _wanted(shards: _Shards, program: Program, layout: Program, only: Sequence[Var] | None) -> Iterator[tuple[Var, bool]]:
    """The variables to load, and whether their placement is that of the checkpoint."""
    must = {d.name for d in (persistables(program) if only is None else only)}
    if only is None:
        state.check_state(shards.folder, persistables(program), shards.layout.global_block().descs, PARAMETERS_ONLY)
    for var in layout.global_block().descs.values():
        found = shards.var(var.name)
        if found is None and var.name in must:
            raise CheckpointError(f"{shards.folder} has no variable {var.name!r}, which {program.label()} needs")
        if found is None or (only is not None and var.name not in must):
            continue
        if not var.type.accepts(found.type):
            raise CheckpointError(f"{shards.folder}: variable {var.name!r} should be {var.type}, the checkpoint has {found.type}")
        alike = var.placement == found.placement and layout.groups == shards.layout.groups
        if alike or var.name in must:
            yield var, alike


def is_checkpoint(folder: str) -> bool:
    """Did `save_shards` write this folder?"""
    found = manifest_of(folder)
    return found is not None and "layout" in found.about


def consolidate(folder: Any, model_path: Any) -> None:
    """Write the global values of a checkpoint, and its program, into one file, as `fx.io.save` does. A replica-local variable becomes its
    mean; `local` variables, which have no global value, are left out."""
    folder = path_of(folder)
    with ExitStack() as stack:
        shards = _Shards(folder, stack.enter_context(reading(folder)), stack)
        program = _program(shards)
        values = {d.name: shards.value(d.name) for d in persistables(program)}
        save_program(model_path, program, values, shards.step(), shards.about.get("extra") or {})


def _program(shards: _Shards) -> Program:
    path, constants = shards.place(_PROGRAM), _PROGRAM + CONSTANTS
    return parsed(path, read_text(path), load_constants(shards.place(constants)) if constants in shards.manifest.files else {})


# -- the newest few -------------------------------------------------------------------------------------------------------------


class CheckpointManager:
    """Checkpoints of a training in one folder: `step-0000000100` and so on. The newest `keep` are kept (None: all).

    `asynchronous`: `save` copies the values and returns, and a thread writes them. The next `save`, `wait` or `close` raises its error.
    With ranks that are processes of one script, each has a thread, and a later run, or one of these calls, completes the checkpoint when
    all have written. An unfinished checkpoint does not count: `latest` does not name it, and the next `save` removes it.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("net"), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.fc(fx.data("x", [-1, 2], "float32"), 1)
    >>> exe = fx.Executor(fx.CPUPlace())
    >>> with fx.scope_guard(fx.Scope()):
    ...     _ = exe.run(startup)
    ...     with fx.io.CheckpointManager("run", keep=2) as checkpoints:
    ...         for step in (10, 20, 30):
    ...             checkpoints.save(step, main, exe, extra={"epoch": step // 10})
    ...         print(checkpoints.steps(), checkpoints.restore(main, exe))
    [20, 30] {'epoch': 3}
    """

    def __init__(self, folder: Any, keep: int | None = 3, asynchronous: bool = False):
        self.folder = path_of(folder)
        self.keep = None if keep is None else whole("CheckpointManager", "keep", keep, 1)
        self.asynchronous = asynchronous
        self._behind: Save | None = None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, the oldest first."""
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise CheckpointError(f"cannot read {self.folder}: {e.strerror or e}") from e
        found = (_STEP.fullmatch(e) for e in entries)
        return sorted(int(m[1]) for m in found if m and os.path.isfile(os.path.join(self.folder, m[0], MANIFEST)))

    def latest(self) -> int | None:
        """The newest step; None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, program: Program | None = None, executor: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint for a step, and remove the oldest ones beyond `keep`. `extra`: see `save_shards`."""
        self.wait()
        path = self._path(whole("CheckpointManager.save", "step", step, 0))
        save = _save(program_or_default(program), path, executor, extra, copies=self.asynchronous, then=partial(self._retire, step))
        if self.asynchronous:
            save.start()
            self._behind = save
        else:
            save.run()

    def restore(self, program: Program | None = None, executor: Any = None, step: int | None = None) -> dict[str, Any] | None:
        """`load_shards` of the newest checkpoint, or of a step; None if there is no checkpoint yet."""
        self.wait()
        found = state.from_first(executor, _LOADS, lambda: self._found(step))
        if found is None:
            return None
        try:
            return load_shards(program, self._path(found), executor)
        except CheckpointError as e:
            there = state.from_first(executor, _LOADS, self.steps)
            if step is None and found not in there:  # another process has saved a newer one and removed it meanwhile
                return self.restore(program, executor)
            older = [s for s in there if s < found]
            raise CheckpointError(f"{e}; older checkpoints: {', '.join(map(str, older))}" if older else str(e)) from e

    def _found(self, step: int | None) -> int | None:
        there = self.steps()
        if step is not None and step not in there:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; there are: {', '.join(map(str, there)) or 'none'}")
        return step if step is not None or not there else there[-1]

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is in place; raises its error. Ranks that are processes must all call it."""
        save, self._behind = self._behind, None
        if save is not None:
            save.wait()

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step:010d}")

    def _retire(self, saved: int) -> None:
        """Remove checkpoints beyond the newest `keep`, and unfinished ones. The one saved just now always stays."""
        there = self.steps()
        if there[-1] > saved:
            warnings.warn(f"{self.folder} has a checkpoint of step {there[-1]}; restore() loads it instead of step {saved}", stacklevel=2)
        old = [s for s in there[: -self.keep] if s != saved] if self.keep is not None else []
        for entry in os.listdir(self.folder):
            if (m := _STEP.fullmatch(entry)) and (int(m[1]) in old or int(m[1]) not in there):
                path = os.path.join(self.folder, entry)
                with suppress(OSError):
                    os.unlink(os.path.join(path, MANIFEST))  # without it the folder is no checkpoint
                shutil.rmtree(path, ignore_errors=True)

    close = wait

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None or self._behind is None or not self._behind.script.spans_processes:
            self.close()
        # else the other ranks may not reach this point: the checkpoint is completed at the next collective call, if there is one


__all__: Sequence[str] = ("CheckpointManager", "consolidate", "is_checkpoint", "load_shards", "save_shards")
