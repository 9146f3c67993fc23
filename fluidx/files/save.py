"""Files on their way into a folder, written by all processes that are ranks of a script, and put in place together."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .atomic import CheckpointError, Entries, Files, Manifest, mark, opened, put_in_place, remove_beside, write_beside

Made = tuple[Files, Mapping[str, Any]]  # the files of a process, and what the manifest is to say beside them


class Save:
    """What `make` gives each process of a group, to be written into a folder in place of what is there.

    Each writes its own files beside those in place; when all are on the disk the first replaces the manifest, and then puts them in place.
    All processes of the group make one, and call the same methods. Raises CheckpointError, on all, where the folder cannot be written to
    or is another one on another host.
    """

    def __init__(self, group: Any, folder: str, make: Callable[[], Made], then: Callable[[], None] = lambda: None):
        """`then` is called by the first when all is in place."""
        self.group, self.folder, self.then = group, folder, then
        self._open, self._thread = ExitStack(), threading.Thread(target=self._go_on, name="fluidx checkpoint")
        self._started = False
        self._entries: Entries = {}
        self._failed: Exception | None = None
        self._together(lambda: self._take(make()))
        if group.spans_processes:
            self._open_together()

    def run(self) -> None:
        """Write the files, and put all in place."""
        with self._open:
            if not self.group.spans_processes:
                self._open_folder()
            try:
                new = {name: entry for one in self._together(self._own) for name, entry in one.items()}
            except BaseException:
                remove_beside(self.folder, self._entries)
                raise
            self._together(lambda: self._put_in_place(new) if self.group.is_first else None)

    def start(self) -> None:
        """Have a thread write the files while the caller goes on."""
        self._started = True
        self._thread.start()
        if self.group.spans_processes:
            self.group.finish_later(self)

    def written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """`run`, what goes wrong being kept for `wait`."""
        try:
            self.run()
        except Exception as e:
            self._failed = e

    def wait(self) -> None:
        """Until what was started is in place; raises what went wrong."""
        if self.group.spans_processes:
            self.group.finish_save()
        else:
            self._thread.join()
        if self._failed is not None:
            raise self._failed

    # -- what a process does -----------------------------------------------------------------------------------------------------

    def _together(self, make: Callable[[], Any]) -> list[Any]:
        return self.group.gather_each(f"save in {self.folder}", make)

    def _take(self, made: Made) -> None:
        self.files, self.about = made

    def _open_folder(self) -> None:
        self.old: Manifest = self._open.enter_context(opened(self.folder, anew=True))

    def _open_together(self) -> None:
        """The first opens the folder, and the others see that it is theirs too."""

        def begin() -> str | None:
            if not self.group.is_first:
                return None
            self._open_folder()
            return mark(self.folder)

        with ExitStack() as stack:
            stack.push(self._open)
            path = self._together(begin)[0]
            found = self._together(lambda: [socket.gethostname(), os.path.exists(path), sorted(self.files)])
            if self.group.is_first:
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
        """What the thread does: all, or what this process does before it meets the others."""
        if not self.group.spans_processes:
            self.finish()
            return
        try:
            self._write()
        except Exception as e:
            self._failed = e

    def _own(self) -> Entries:
        """Have this process's files on the disk."""
        if self._started and self.group.spans_processes:
            self._thread.join()
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
        else:
            self._write()
        return self._entries

    def _write(self) -> None:
        self._entries = write_beside(self.folder, self.files)
        self.files = {}  # which may hold copies of values

    def _put_in_place(self, new: Entries) -> None:
        put_in_place(self.folder, self.old, new, self.about, alone=True)
        self.then()
