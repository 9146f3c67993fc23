"""What programs say as files: a text, and beside it the large arrays that it names by digest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._checks import wrong
from ._safetensors import ArrayFile, CheckpointError, save_arrays, write_atomically
from .ir import ParseError, Program, ProgramPair
from .ir.constants import Array, is_digest
from .ir.parser import parse_any

_CONSTANTS = ".constants.safetensors"
_TEXT_LIMIT = 1 << 30


def save_text(program: Program | ProgramPair, path: Any) -> None:
    """Write the text of a program, or of main and startup, to `path`, and the arrays that it names by digest into the file beside it,
    `path` plus ".constants.safetensors". Without such arrays there is no file beside it.
    """
    if not isinstance(program, (Program, ProgramPair)):
        raise wrong(f"save_text: expected a Program or a ProgramPair, got {type(program).__name__}")
    write_text(path_of(path), str(program), program.constants())


def load_text(path: Any) -> Any:
    """The Program that `save_text` wrote, or the ProgramPair where the text has a startup section.

    Raises ParseError for what is no program, or when its constants are not beside it.
    """
    path = path_of(path)
    try:
        return parse_any(read_text(path), constants_beside(path))
    except ParseError as e:
        raise ParseError(f"{path}: {e}") from None


def load_constants(path: Any) -> dict[str, Array]:
    """The arrays in a file that `save_text`, `save` or `save_inference_model` wrote, by digest: what a parser of program texts is given.

    Raises CheckpointError, naming the file, for an array that is not what its digest says.
    """
    with ArrayFile(path_of(path)) as file:
        return constants_in(file)


def constants_beside(path: Any) -> dict[str, Array]:
    """`load_constants` of the file beside a program text; nothing where there is none."""
    beside = path_of(path) + _CONSTANTS
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
    if constants:
        save_arrays(path + _CONSTANTS, {digest: a.values for digest, a in constants.items()}, {"format": "fluidx"})
    write_atomically(path, lambda stream: stream.write(text.encode()))


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
    return os.fspath(path)
