"""Program text files: the text of a program, and a second file with the large constants that it names by digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .._checks import wrong
from ..ir import ParseError, Program, ProgramPair
from ..ir.constants import Array, is_digest
from ..ir.parser import parse_any
from .atomic import CheckpointError, check_path, write_atomically
from .safetensors import ArrayFile, save_arrays

SUFFIX = ".safetensors"
CONSTANTS = ".constants" + SUFFIX
_TEXT_LIMIT = 1 << 30


def save_text(program: Program | ProgramPair, path: Any) -> None:
    """Write the text of a program, or of a main and a startup program, to `path`. Arrays that it names by digest go to a second file,
    `path` plus ".constants.safetensors"; without such arrays there is no second file.
    """
    if not isinstance(program, (Program, ProgramPair)):
        raise wrong(f"save_text: expected a Program or a ProgramPair, got {type(program).__name__}")
    write_text(path_of(path), str(program), program.constants())


def load_text(path: Any) -> Any:
    """The Program that `save_text` wrote; a ProgramPair if the text has a startup section.

    Raises ParseError if the file is not a program text, or if the file of its constants is missing.
    """
    path = path_of(path)
    try:
        return parse_any(read_text(path), constants_beside(path))
    except ParseError as e:
        raise ParseError(f"{path}: {e}") from None


def load_constants(path: Any) -> dict[str, Array]:
    """The constants in a file that `save_text`, `save` or `save_inference_model` wrote, by digest, for the parser of program texts.

    Raises CheckpointError, which names the file, if an array does not fit its digest.
    """
    with ArrayFile(path_of(path)) as file:
        return constants_in(file)


def constants_beside(path: Any) -> dict[str, Array]:
    """`load_constants` for the constants file of a program text; {} if there is none."""
    beside = path_of(path) + CONSTANTS
    return load_constants(beside) if os.path.exists(beside) else {}


def constants_in(file: ArrayFile) -> dict[str, Array]:
    found = {}
    for digest in filter(is_digest, file.names):
        array = file.array(digest)
        array.setflags(write=False)
        found[digest] = Array(array)
        if found[digest].digest != digest:
            raise CheckpointError(
                f"{file.path} was changed since it was written: what it holds as constant {digest} has the digest {found[digest].digest}; "
                "save the program again"
            )
    return found


def write_text(path: str, text: str, constants: Mapping[str, Array]) -> None:
    """Write a text and its constants file. The constants of the older text stay until the new text is in place."""
    beside, values = path + CONSTANTS, {digest: a.values for digest, a in constants.items()}
    older: dict[str, Any] = {}
    if os.path.exists(beside):
        with suppress(CheckpointError):
            older = {digest: a.values for digest, a in load_constants(beside).items()}
    if values:
        save_arrays(beside, {**older, **values})
    write_atomically(path, lambda stream: stream.write(text.encode()))
    if older.keys() - values.keys():
        if values:
            save_arrays(beside, values)
        else:
            os.unlink(beside)


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's additional data for a checkpoint. Raises CheckpointError if they are not JSON data."""
    if not isinstance(extra, Mapping | None):
        raise wrong(f"extra must be a dictionary, got {type(extra).__name__}: {extra!r}")
    found = dict(extra or {})
    try:
        json.dumps(found)
    except (TypeError, ValueError) as e:
        said = "numbers, strings, lists and dictionaries"
        raise CheckpointError(f"extra must be what JSON can say, {said}: {e}; arrays: array.tolist()") from None
    return found


def save_program(path: Any, program: Program, values: Mapping[str, Any], step: int, extra: Mapping[str, Any] | None) -> None:
    """Write one file with a program, its constants and the values of its variables."""
    arrays = {**values, **{digest: a.values for digest, a in program.constants().items()}}
    metadata = {"program": program.to_string(), "step": str(step), "extra": json.dumps(checked_extra(extra))}
    save_arrays(with_suffix(path), arrays, metadata)


def parsed(path: str, text: str, constants: Mapping[str, Array]) -> Program:
    """Parse the program in a file. Raises CheckpointError if it is not a program."""
    try:
        return Program.parse_from_string(text, constants)
    except ParseError as e:
        raise CheckpointError(f"{path}: the program in it cannot be read: {e}") from e


def with_suffix(path: Any) -> str:
    """The path with the file suffix, if it lacks it."""
    path = path_of(path)
    if os.path.basename(path) in ("", ".", ".."):
        raise CheckpointError(f"{path!r} is no file name")
    return path if path.endswith(SUFFIX) else path + SUFFIX


def read_text(path: str) -> str:
    try:
        size = os.path.getsize(path)
        if size > _TEXT_LIMIT:
            raise CheckpointError(f"{path} has {size} bytes; a program text has {_TEXT_LIMIT} at most")
        with open(path, encoding="utf-8", newline="") as stream:
            return stream.read()
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is no program text") from None


def path_of(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise wrong(f"a path must be a non-empty string or Path, got {type(path).__name__}: {path!r}")
    check_path(path)
    return os.fspath(path)
