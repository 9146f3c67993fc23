"""Write the scalars that runs fetch to TensorBoard event files. It imports the package tensorboard when a folder is opened."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ir.errors import ExecutionError, install

_SOON = 5.0  # seconds until written data are flushed, so that TensorBoard sees them


class Events:
    """Scalars by name, step and time. The files of the first program are in the folder, those of other programs in subfolders, which
    TensorBoard shows as separate runs, because each program counts its own steps."""

    def __init__(self, folder: Path):
        """Raises ExecutionError if TensorBoard's writer is not installed, OSError if the folder cannot be written."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as e:
            raise ExecutionError(f"this needs the package tensorboard: {e}; {install('tensorboard')}") from e
        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        self._open = lambda where: EventFileWriter(str(where), flush_secs=_SOON)
        folder.mkdir(parents=True, exist_ok=True)
        # fails here if the folder cannot be written: the writer's thread would only print a traceback
        with tempfile.TemporaryFile(dir=folder):
            pass
        self._folder, self._folders = folder, dict[str, Path]()
        self._writers: dict[Path, Any] = {folder: self._open(folder)}
        self._begun: set[Path] = set()

    def take(self, record: Mapping[str, Any]) -> None:
        """Write a record of `metrics.Told`; a value that is not finite becomes NaN."""
        numbers = {name: v for name, v in record.items() if name not in ("program", "step", "time", "rate")}
        where = self._folders.setdefault(record["program"], self._folder_of(record["program"]))
        if where not in self._writers:
            self._writers[where] = self._open(where)
        at = {"step": record["step"], "wall_time": record["time"]}
        if where not in self._begun:  # TensorBoard drops older data of this step and of later ones
            self._begun.add(where)
            self._writers[where].add_event(self._event(session_log=self._session(status=self._session.START), **at))
        values = [self._summary.Value(tag=name, simple_value=math.nan if v is None else v) for name, v in numbers.items()]
        self._writers[where].add_event(self._event(summary=self._summary(value=values), **at))

    def _folder_of(self, program: str) -> Path:
        return self._folder / re.sub(r"[^\w-]", "_", program) if self._folders else self._folder

    def close(self) -> None:
        """Write all data. Later records go to new files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._begun.clear()
