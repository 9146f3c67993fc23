"""The text form of a pipeline: a strategy and passes in front of it, with options: `zero1{bucket_mb=4},join_attention`.

A strategy or a pass of a user's module is named `package.module:name`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...ir.errors import TranspileError
from ...ir.pass_base import PASSES, Pass, changed_fields, pass_name

_NAME = re.compile(r"[A-Za-z_][\w.]*(?::[A-Za-z_][\w.]*)?")
_OPTION = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\"[^\"]*\"|'[^']*'|[^,{}]*?)\s*(?=[,}])")
_WORDS = {"true": True, "false": False, "none": None}
_PLAIN = re.compile(r"[A-Za-z_][\w./:]*")


class Stage(NamedTuple):
    """A strategy or a pass by name, with its options."""

    name: str
    options: dict[str, Any]


def parse_pipeline(text: str) -> list[Stage]:
    """The stages of a text, in order. Raises TranspileError for a malformed text, with the position.

    >>> parse_pipeline("zero1{bucket_mb=4, algorithm=ring},join_attention")
    [Stage(name='zero1', options={'bucket_mb': 4, 'algorithm': 'ring'}), Stage(name='join_attention', options={})]
    """
    return [*_stages(text)]


def show_stage(name: str, options: Mapping[str, Any]) -> str:
    """A stage as text that parses back. Raises TranspileError for an option without a text form.

    >>> show_stage("zero1", {"bucket_mb": 4.0, "strict": True, "algorithm": ""})
    'zero1{bucket_mb=4.0,strict=true,algorithm=""}'
    """
    shown = ",".join(f"{key}={_shown(name, key, value)}" for key, value in options.items())
    return f"{name}{{{shown}}}" if shown else name


def show_pass(one: Pass) -> str:
    """A pass as a stage. Raises TranspileError if its class is not at the top level of a module.

    >>> from fluidx.rewrite import ChannelsLast
    >>> show_pass(ChannelsLast(always=True))
    'channels_last{always=true}'
    """
    of = type(one)
    name = pass_name(of) if PASSES.get(pass_name(of)) is of else f"{of.__module__}:{of.__qualname__}"
    if not _NAME.fullmatch(name):
        raise TranspileError(f"{one!r} has no text form: its class must stand in a module")
    return show_stage(name, {f.name: getattr(one, f.name) for f in changed_fields(one)})


def _shown(name: str, key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str) and not {'"', "'"} <= set(value):
        quote = "'" if '"' in value else '"'
        return value if _PLAIN.fullmatch(value) and value not in _WORDS else f"{quote}{value}{quote}"
    raise TranspileError(f"{name}: {key}={value!r} has no text form; text has numbers, words, true, false and none")


def _stages(text: str) -> Iterator[Stage]:
    at = 0
    while True:
        at = _skip(text, at)
        if (found := _NAME.match(text, at)) is None:
            raise _wrong(text, at, "the name of a strategy or a pass")
        at = _skip(text, found.end())
        options: dict[str, Any] = {}
        if text[at : at + 1] == "{":
            at = _options(text, at + 1, options)
        yield Stage(found.group(), options)
        at = _skip(text, at)
        if at == len(text):
            return
        if text[at] != ",":
            raise _wrong(text, at, '"," or the end')
        at += 1


def _options(text: str, at: int, options: dict[str, Any]) -> int:
    """Read `key=value, ...}`; returns the position after it."""
    while text[(at := _skip(text, at)) : at + 1] != "}":
        found = _OPTION.match(text, at)
        if found is None:
            raise _wrong(text, at, 'option=value and then "," or "}"')
        key, value = found.groups()
        if key in options:
            raise _wrong(text, at, f"another option than {key}, which is given twice")
        options[key] = _value(value)
        at = found.end()
        if text[at] == ",":
            at += 1
    return at + 1


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] in ('"', "'"):
        return text[1:-1]  # as it stands: there are no escapes
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if isinstance(found, (int, float)) else text


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _wrong(text: str, at: int, expected: str) -> TranspileError:
    return TranspileError(
        f"strategy {text!r}: expected {expected} at character {at + 1}, found {text[at : at + 12] or 'the end'!r}\n"
        "  write it as zero1{bucket_mb=4},join_attention"
    )
