"""Save: all processes of a script write files into one folder, as one atomic change."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .atomic import CheckpointError, Entries, Files, Manifest, mark, opened, put_in_place, remove_beside, write_beside

if TYPE_CHECKING:
    from ..executor.ranks.rank_group import ScriptProcesses

Made = tuple[Files, Mapping[str, Any]]  # the files of a process, and further data for the manifest


class Save:
    """Writes the files that `make()` returns in each process of a script into a folder, and replaces all files there.

    Each process writes its own files under temporary names. When all are on disk, the first process replaces the manifest and renames them.
    All processes of the script make a Save and call the same methods. Raises CheckpointError on all of them if the folder cannot be
    written, or if hosts see different folders.
    """

    def __init__(self, script: ScriptProcesses, folder: str, make: Callable[[], Made], then: Callable[[], None] = lambda: None):
        """`then` is called by the first process when all files are in place."""
        self.script, self.folder, self.then = script, folder, then
        self._open, self._thread = ExitStack(), threading.Thread(target=self._go_on, name="fluidx checkpoint")
        self._started = False
        self._entries: Entries = {}
        self._failed: Exception | None = None
        self._together(lambda: self._take(make()))
        if script.spans_processes:
            self._open_together()

    def run(self) -> None:
        """Write the files and put all of them in place."""
        with self._open:
            if not self.script.spans_processes:
                self._open_folder()
            try:
                new = {name: entry for one in self._together(self._own) for name, entry in one.items()}
            except BaseException:
                remove_beside(self.folder, self._entries)
                raise
            self._together(lambda: self._put_in_place(new) if self.script.is_first else None)

    def start(self) -> None:
        """Write the files on a background thread."""
        self._started = True
        self._thread.start()
        if self.script.spans_processes:
            self.script.finish_later(self)

    def written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """`run`, but an error is stored for `wait`."""
        try:
            self.run()
        except Exception as e:
            self._failed = e

    def wait(self) -> None:
        """Wait until the started save is in place; raises its error."""
        if self.script.spans_processes:
            self.script.finish_save()
        else:
            self._thread.join()
        if self._failed is not None:
            raise self._failed

    # -- steps of a process ------------------------------------------------------------------------------------------------------

    def _together(self, make: Callable[[], Any]) -> list[Any]:
        return self.script.gather_each(f"save in {self.folder}", make)

    def _take(self, made: Made) -> None:
        self.files, self.about = made

    def _open_folder(self) -> None:
        self.old: Manifest = self._open.enter_context(opened(self.folder, anew=True))

    def _open_together(self) -> None:
        """The first process opens the folder; the others check that they see the same folder."""

        def begin() -> str | None:
            if not self.script.is_first:
                return None
            self._open_folder()
            return mark(self.folder)

        with ExitStack() as stack:
            stack.push(self._open)
            path = self._together(begin)[0]
            found = self._together(lambda: [socket.gethostname(), os.path.exists(path), sorted(self.files)])
            if self.script.is_first:
                os.unlink(path)
            if missing := [(host, name) for host, there, names in found if not there for name in names]:
                raise self._other_folder(found[0][0], missing)
            stack.pop_all()

    def _other_folder(self, first: str, missing: Sequence[tuple[str, str]]) -> CheckpointError:
        return CheckpointError(
            f"cannot save in {self.folder}: not all hosts share this folder. A file that rank 0 wrote there, on {first}, is not visible on "
            f"{', '.join(dict(missing))}; the checkpoint would lack {', '.join(f'{name} of {host}' for host, name in missing)}. Use a "
            "folder that all hosts share, or let rank 0 write the global values: fx.io.save without sharded=True"
        )

    def _go_on(self) -> None:
        """The work of the thread: the whole save, or, with several processes, only this process's files."""
        if not self.script.spans_processes:
            self.finish()
            return
        try:
            self._write()
        except Exception as e:
            self._failed = e

    def _own(self) -> Entries:
        """Write this process's files to disk, or wait for the thread that does; returns their entries."""
        if self._started and self.script.spans_processes:
            self._thread.join()
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
        else:
            self._write()
        return self._entries

    def _write(self) -> None:
        self._entries = write_beside(self.folder, self.files)
        self.files = {}  # they may hold copies of values

    def _put_in_place(self, new: Entries) -> None:
        put_in_place(self.folder, self.old, new, self.about, alone=True)
        self.then()
