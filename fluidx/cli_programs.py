"""What commands on program files have in common: reading, transpiling and writing them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import click

from .ir.errors import ProgramError


def read(*paths: str) -> list[Any]:
    """A program, or a pair with startup, from each text or JSON file. Constants stored next to one file serve all."""
    from .files.program_text import constants_beside

    constants = {digest: a for path in paths for digest, a in constants_beside(path).items()}
    return [_parsed(path, constants) for path in paths]


def _parsed(path: str, constants: Any) -> Any:
    from . import ops  # noqa: F401  (fills the op registry)
    from .ir.jsonform import from_json
    from .ir.parser import parse_any

    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return from_json(json.loads(text), constants)
        return parse_any(text, constants)
    except UnicodeDecodeError as e:
        raise click.ClickException(f"{path} is not a program: byte {e.start} is not UTF-8 text") from None
    except (json.JSONDecodeError, ProgramError) as e:
        raise click.ClickException(f"{path} is not a program: {e}") from None
    except OSError as e:
        raise click.ClickException(f"cannot read {path}: {e.strerror}") from None


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise click.ClickException(f"cannot write {path}: {e.strerror}") from None
    click.echo(f"wrote {path}")


def main_of(program: Any) -> Any:
    return getattr(program, "main", program)


def transpiled(program: Any, file: str, strategy: str, ranks: Any) -> Any:
    from .ir.source_location import by_command
    from .transpiler import DistributeTranspiler, strategies

    if not hasattr(program, "startup"):
        raise click.ClickException(f"{file} has no startup section; write both with fx.io.save_text(fx.ProgramPair(main, startup), FILE)")
    with by_command(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        t = DistributeTranspiler(strategies.get(strategy))
        t.transpile(program=program.main, startup_program=program.startup, trainers=ranks)
    for w in found:
        click.echo(f"Warning: {w.message}", err=True)
    return t
