"""Atomic file replacement, for one file or several together: after a crash at any moment either all old files or all new files are there.

The next write to the same place removes files that a crash left behind.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, BinaryIO, NamedTuple

from ..ir import FluidxError

try:
    import fcntl
except ImportError:  # without file locks nobody knows whether an unfinished file is in use, so none is removed
    fcntl = None  # type: ignore[assignment]

MANIFEST = "__manifest__.json"
VERSION = 1  # version of array files and of manifests
_LIMIT = 1 << 28  # bytes of a manifest, at most
_SUM = re.compile(rb',\n "crc32": ([0-9]+)\n}\Z')  # the end of a manifest
_WRITERS = 8  # threads that write files at the same time

Write = Callable[[BinaryIO], Any]


class CheckpointError(FluidxError, ValueError):
    """A saved file is missing, damaged, or does not fit the program."""


def check_path(path: Any) -> None:
    """Raise CheckpointError for a path that no file system allows."""
    if "\0" in str(path):
        raise CheckpointError(f"{str(path)!r} has a NUL byte, which is not allowed in a path")


# -- one file -----------------------------------------------------------------------------------------------------------------


def write_atomically(path: str, write: Write) -> None:
    """Write a file by `write(stream)` next to `path`, then rename it to `path`: readers see the old file or the new one."""
    write_in_order({path: write})


def write_in_order(files: Mapping[str, Write]) -> None:
    """Write files by path, each under a temporary name; when all are complete, rename them in this order.

    If one cannot be written, all old files stay. Only after a crash between two renames is the first file new and the next one old: for
    files that other programs read without a manifest. `write_together` has no such moment.
    """
    with ExitStack() as written:
        temporaries = [(path, _complete(written, path, write)) for path, write in files.items()]
        for path, temporary in temporaries:
            with _told(path):
                os.replace(temporary, path)
        for path in files:
            _folder_to_disk(os.path.dirname(os.path.abspath(path)))


def _complete(held: ExitStack, path: str, write: Write) -> str:
    """Write a temporary file for `path` and sync it to disk. Returns its path; it is removed when `held` ends unless it was renamed."""
    check_path(path)
    folder, name = os.path.split(os.path.abspath(path))
    with _told(path):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.makedirs(folder, exist_ok=True)
        _sweep(folder, name)
        stream = held.enter_context(_temporary(folder, name))
        write(stream)
        _to_disk(stream)
        return stream.name


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot write {path}: {e.strerror or e}") from e


@contextmanager
def _temporary(folder: str, name: str) -> Iterator[BinaryIO]:
    """A new file next to the one of that name. It is locked while it is written, and removed afterwards unless it was renamed."""
    while True:
        path = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
        stream = open(path, "xb")
        if _locked(stream) is not False and os.fstat(stream.fileno()).st_nlink:
            break  # no other process removed it before it was locked
        stream.close()
    try:
        with stream:
            yield stream
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _sweep(folder: str, name: str) -> None:
    """Remove the temporary files of crashed writers of this file."""
    left = re.compile(rf"\.{re.escape(name[:100])}\.[0-9a-f]{{16}}\.tmp")
    for entry in os.listdir(folder) if fcntl else ():
        if left.fullmatch(entry):
            path = os.path.join(folder, entry)
            with suppress(OSError), open(path, "r+b") as stream:  # over NFS a lock needs write access
                if _locked(stream):
                    os.unlink(path)


def _locked(stream: BinaryIO) -> bool | None:
    """Lock an open file; the lock ends with the process. False if another process has it, None if the file system has no locks."""
    if not fcntl:
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _folder_to_disk(folder: str) -> None:
    """Sync a folder to disk: only then is a file's new name durable."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# -- several together -------------------------------------------------------------------------------------------------------


class Manifest:
    """A folder's manifest: the files that belong together, each with its checksum, and `about`, further data of the writer."""

    def __init__(self, files: dict[str, dict[str, Any]], about: dict[str, Any]):
        self.files, self.about = files, about


class Elsewhere(NamedTuple):
    """A file that another process writes: `ask(path)` makes it write, and returns the manifest entry. If that process ends before
    (EOFError), this process writes the file."""

    ask: Callable[[str], dict[str, int]]
    write: Write
    close: Callable[[], Any]  # called when the other process is not needed any more

    def written(self, path: str) -> dict[str, int]:
        try:
            return self.ask(path)
        except EOFError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return written(path, self.write)
        finally:
            self.close()


Files = Mapping[str, Write | Elsewhere]
Entries = dict[str, dict[str, Any]]  # manifest entries, by file name


def write_together(folder: str, files: Files, about: Mapping[str, Any] | None = None, alone: bool = False) -> None:
    """Write several files, by name, into a folder as one atomic change. They are written under temporary names; then the manifest is
    replaced and names them; then they are renamed. A reader in between, or after a crash, follows the manifest.

    Earlier files stay in the folder and in the manifest, unless `alone`. `about` is added to the manifest.
    """
    with opened(folder) as old:
        put_in_place(folder, old, write_beside(folder, files), about, alone)


@contextmanager
def opened(folder: str, anew: bool = False) -> Iterator[Manifest]:
    """A context that locks the folder for writers and gives its manifest. Changes of a crashed writer are completed or undone first.

    `anew`: all files will be replaced, so a manifest that cannot be read counts as missing.
    """
    with _told(folder):
        os.makedirs(folder, exist_ok=True)
        with _locked_folder(folder, alone=True):
            yield _settled(folder, anew)


def write_beside(folder: str, files: Files) -> Entries:
    """Write files under temporary names, several at the same time; returns their entries for `put_in_place`. If one fails, all are
    removed."""
    tokens = {name: secrets.token_hex(8) for name in files}
    try:
        entries = _at_once(lambda name: written(_waiting(folder, name, tokens[name]), files[name]), files)
    except BaseException:
        remove_beside(folder, {name: {"token": token} for name, token in tokens.items()})
        raise
    return {name: {"token": tokens[name], **entries[name]} for name in files}


def remove_beside(folder: str, entries: Entries) -> None:
    """Remove files that `write_beside` wrote."""
    for name, entry in entries.items():
        with suppress(OSError):
            os.unlink(_waiting(folder, name, entry["token"]))


def put_in_place(folder: str, old: Manifest, new: Entries, about: Mapping[str, Any] | None = None, alone: bool = False) -> None:
    """Replace the manifest of an opened folder by one that names the new files, and rename these to their final names."""
    with _told(folder):
        entries = new if alone else {**old.files, **new}
        content = {"format": "fluidx", "version": VERSION, **({} if alone else old.about), **(about or {}), "files": entries}
        try:
            for name, entry in new.items():
                _look_at(_waiting(folder, name, entry["token"]), entry)
            _folder_to_disk(folder)
            write_atomically(os.path.join(folder, MANIFEST), lambda stream: stream.write(_summed(json.dumps(content, indent=1).encode())))
        except BaseException:
            remove_beside(folder, new)
            raise
        for name, entry in new.items():
            os.replace(_waiting(folder, name, entry["token"]), os.path.join(folder, name))
        for name in old.files.keys() - entries.keys():
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
        _folder_to_disk(folder)


def _summed(text: bytes) -> bytes:
    """A JSON table with its own checksum as the last entry."""
    return text[:-2] + b',\n "crc32": %d\n}' % zlib.crc32(text)


def mark(folder: str) -> str:
    """Make a file by which other processes check that they see the same folder. The next write removes it after a crash."""
    path = _waiting(folder, "mark", secrets.token_hex(8))
    with _told(folder), open(path, "xb"):
        return path


def _look_at(path: str, entry: Mapping[str, Any]) -> None:
    size = os.stat(path).st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"cannot write {path}: it has {size} bytes, and {entry['bytes']} were written")


def _at_once(do: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """{name: do(name)}, computed by several threads. The first error is raised when all threads have ended."""
    todo, done, errors = deque(names), dict[str, Any](), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                name = todo.popleft()
            except IndexError:
                return
            try:
                done[name] = do(name)
            except BaseException as e:
                errors.append(e)

    threads = [threading.Thread(target=work, name="fluidx files") for _ in range(min(len(todo), _WRITERS) - 1)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return done


def _waiting(folder: str, name: str, token: str) -> str:
    return os.path.join(folder, f".{name[:200]}.{token}.new")


class _Counted:
    """A stream that counts the written bytes and computes their checksum."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.crc32, self.bytes = stream, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.crc32, self.bytes = zlib.crc32(view, self.crc32), self.bytes + view.nbytes
        return self.stream.write(view)


def written(path: str, write: Write | Elsewhere) -> dict[str, int]:
    """Write a new file and sync it to disk. Returns its manifest entry."""
    if isinstance(write, Elsewhere):
        return write.written(path)
    with _told(os.path.dirname(path)), open(path, "xb") as stream:
        counted: Any = _Counted(stream)
        write(counted)
        _to_disk(stream)
    return {"crc32": counted.crc32, "bytes": counted.bytes}


@contextmanager
def _locked_folder(folder: str, alone: bool) -> Iterator[None]:
    """A context that locks the folder: no other process writes to it, and with `alone` none reads. Without locks in the file system it does
    nothing. Locks end with the process."""
    if not fcntl:
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # needed because a fork of this process may still have the file open
        os.close(fd)


def _settled(folder: str, anew: bool = False) -> Manifest:
    """The manifest, after the files of a crashed writer were renamed (if the manifest names them) or removed."""
    found = Manifest({}, {})
    with suppress(CheckpointError) if anew else nullcontext():
        found = manifest_of(folder) or found
    for entry in os.listdir(folder):
        if match := re.fullmatch(r"\.(.+)\.([0-9a-f]{16})\.new", entry):
            path = os.path.join(folder, entry)
            name = next((n for n, e in found.files.items() if e["token"] == match[2]), None)
            if name is None:
                os.unlink(path)
            else:
                os.replace(path, os.path.join(folder, name))
    _sweep(folder, MANIFEST)
    return found


def manifest_of(folder: str) -> Manifest | None:
    """The manifest of a folder; None if there is none. Raises CheckpointError if it cannot be read."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as stream:
            text = stream.read(_LIMIT)
        said = json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is damaged: {str(e)[:80]}") from None
    files = said.pop("files", None) if isinstance(said, dict) else None
    if not isinstance(files, dict) or said.get("format") != "fluidx" or not all(_is_entry(n, e) for n, e in files.items()):
        raise CheckpointError(f"{path} is not a manifest of fluidx")
    check_version(path, said.get("version"))
    end = _SUM.search(text)
    if end is None or zlib.crc32(text[: end.start()] + b"\n}") != int(end[1]):
        raise CheckpointError(f"{path} is damaged: it does not have the checksum that was written with it")
    return Manifest(files, {k: v for k, v in said.items() if k != "crc32"})


def check_version(path: str, version: Any) -> None:
    """Raise CheckpointError for a file of a version that this fluidx does not know."""
    if type(version) is not int or not 1 <= version <= VERSION:
        found = f"{version!r:.40}"
        raise CheckpointError(f"{path} has version {found}, and this fluidx reads up to {VERSION}; read it with the one that wrote it")


def _is_entry(name: str, entry: Any) -> bool:
    plain = os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name
    return (
        plain and isinstance(entry, dict) and all(isinstance(entry.get(k), t) for k, t in (("token", str), ("crc32", int), ("bytes", int)))
    )


def settle(folder: str) -> None:
    """Complete or undo the changes of a crashed writer in a folder, if the folder is writable."""
    if os.path.exists(os.path.join(folder, MANIFEST)):
        with suppress(OSError), _locked_folder(folder, alone=True):
            _settled(folder)


def place_of(folder: str, name: str, manifest: Manifest | None) -> str:
    """The path of a file in a folder, by its manifest if there is one. Its checksum is verified.

    Raises CheckpointError if the file does not fit the manifest.
    """
    path = os.path.join(folder, name)
    if manifest is None or name not in manifest.files:
        return path
    said = manifest.files[name]
    waiting = _waiting(folder, name, said["token"])
    path = waiting if os.path.exists(waiting) else path
    crc32, size = 0, 0
    try:
        with open(path, "rb") as stream:
            while block := stream.read(1 << 22):
                crc32, size = zlib.crc32(block, crc32), size + len(block)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    if (crc32, size) != (said["crc32"], said["bytes"]):
        what = f"it has {size} bytes, expected {said['bytes']}" if size != said["bytes"] else "its checksum is another one"
        raise CheckpointError(
            f"{path} is not what was saved: {what}; it is damaged, or was put there from elsewhere (then remove {MANIFEST} beside it)"
        )
    return path


@contextmanager
def reading(folder: str, settled: bool = False) -> Iterator[Manifest | None]:
    """A context for reading files of a folder: no process replaces them meanwhile. Changes of a crashed writer are completed or undone
    first if the folder is writable, unless it is `settled`: processes that read together call `settle` before any of them reads."""
    if not settled:
        settle(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked_folder(folder, alone=False))
        except OSError as e:
            raise CheckpointError(f"cannot read {folder}: {e.strerror or e}") from e
        yield manifest_of(folder)
