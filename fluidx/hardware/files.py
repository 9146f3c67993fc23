"""Files of machines: JSON in which every number has its source. Sheets of usual machines are in the folder data and are known by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ..ir.errors import FluidxError, nearest
from .records import Device, Figure, Hardware, LinkFigures, SwitchFigures

_DATA = Path(__file__).with_name("data")
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8", "int8", "tf32")
_FIGURE = '{"value": 1.5e9, "source": "where it is published or how it was measured"}'
_HARDWARE = ("name", "about", "devices_per_host", "hosts", "device", "inside", "between", "host_memory")
_DEVICE = ("name", "kind", "memory", "flops", "share", "bandwidth", "bandwidth_share", "call", "slowdown", "context")
_SHARES = ("share", "bandwidth_share")

# -- reading ------------------------------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The names of the sheets.

    >>> "dgx-a100" in names()
    True
    """
    return sorted(path.stem for path in _DATA.glob("*.json"))


def load(name_or_path: str | os.PathLike[str]) -> Hardware:
    """The figures of a machine: a sheet by its name, or a file by its path, which ends with ".json" or has a folder in it.

    >>> load("dgx-a100").device.flops["bfloat16"].value
    312000000000000.0
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise FluidxError(f"a cluster is a name or the path of a JSON file, got {name_or_path!r}")
    given = str(os.fspath(name_or_path))
    if given in names():
        return _sheet(given)
    path = Path(given)
    if not (given.endswith(".json") or path.name != given or path.is_file()):
        raise FluidxError(f"unknown cluster {given!r}; {nearest(given, names(), 'there are')} (a file of your own ends with .json)")
    return _read(path)


@cache
def _sheet(name: str) -> Hardware:
    return _read(_DATA / f"{name}.json")


def _read(path: Path) -> Hardware:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FluidxError(f"cluster file {path} does not exist; names that need no file: {', '.join(names())}") from None
    except (OSError, ValueError) as e:
        raise FluidxError(f"cluster file {path} cannot be read: {e}") from None
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _without_twins(pairs, path))
    except json.JSONDecodeError as e:
        raise FluidxError(f"cluster file {path} is not JSON: line {e.lineno}, column {e.colno}: {e.msg}") from None
    return from_json(data, str(path))


def _without_twins(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key in found if [k for k, _ in pairs].count(key) > 1)
        raise FluidxError(f"cluster file {path}: key {twice!r} is given twice in one object")
    return found


def from_json(data: Any, file: str) -> Hardware:
    """The figures in an object of the JSON form. `file` begins the messages of errors: FluidxError for a key that is missing or unknown, a
    number that is not above 0, or one without a source.

    >>> from_json({"name": 3}, "mine.json")
    Traceback (most recent call last):
    fluidx.ir.errors.FluidxError: cluster file mine.json: name must be a text, got 3
    """
    top = _JsonPart(data, "", file)
    found = Hardware(
        name=top.text("name"),
        about=top.text("about"),
        devices_per_host=top.whole("devices_per_host"),
        hosts=top.optional("hosts", top.whole),
        device=_device(top.part("device")),
        inside=_links(top.part("inside")),
        between=top.optional("between", lambda key: _links(top.part(key))),
        host_memory=top.figure("host_memory"),
        to_host=top.optional("to_host", lambda key: _links(top.part(key))),
        measured=top.data.get("measured"),
    )
    top.end((*_HARDWARE, "to_host", "measured"))
    return found


def _device(part: _JsonPart) -> Device:
    flops = part.part("flops")
    flops.end(_DTYPES)
    if not flops.data:
        raise flops.wrong("", "has no dtype; give operations a second by dtype", f'{{"float32": {_FIGURE}}}')
    if (kind := part.text("kind")) not in ("gpu", "cpu"):
        raise part.wrong("kind", 'must be "gpu" or "cpu"', kind)
    shares = {key: part.figure(key, most=1.0) for key in _SHARES}
    found = Device(
        name=part.text("name"),
        kind=kind,
        flops={dtype: flops.figure(dtype) for dtype in flops.data},
        slowdown=part.figure("slowdown", least=1.0),
        cores=part.whole("cores", 0, 0),
        dispatch=part.optional("dispatch", part.figure) if "dispatch" in part.data else None,
        **shares,
        **{key: part.figure(key) for key in ("memory", "bandwidth", "call", "context")},
    )
    part.end((*_DEVICE, "cores", "dispatch"))
    return found


def _links(part: _JsonPart) -> LinkFigures:
    groups = part.part("by_group") if "by_group" in part.data else _JsonPart({}, "by_group", part.file)
    if wrong := next((key for key in groups.data if not key.isdecimal() or int(key) < 2), None):
        raise groups.wrong("", 'has keys that are numbers of devices, "2" or more', wrong)
    found = LinkFigures(
        latency=part.figure("latency"),
        bandwidth=part.figure("bandwidth"),
        count=part.whole("count", 1),
        by_group={int(key): groups.figure(key) for key in groups.data},
        collective_latency=part.optional("collective_latency", part.figure) if "collective_latency" in part.data else None,
        eager=part.whole("eager", LinkFigures.eager, 0),
        in_switch=part.optional("in_switch", lambda key: _switch(part.part(key))) if "in_switch" in part.data else None,
        shared=part.optional("shared", part.figure) if "shared" in part.data else None,
        message=part.optional("message", part.figure) if "message" in part.data else None,
        call_bytes=part.whole("call_bytes", LinkFigures.call_bytes, 0),
    )
    part.end(tuple(LinkFigures.__dataclass_fields__))
    return found


def _switch(part: _JsonPart) -> SwitchFigures:
    part.end(SwitchFigures._fields)
    return SwitchFigures(part.figure("latency"), part.figure("bandwidth"))


class _JsonPart:
    """An object in the file, and the path of keys that leads to it."""

    def __init__(self, data: Any, path: str, file: str):
        self.data, self.path, self.file = data, path, file
        if not isinstance(data, dict):
            raise self.wrong("", "must be an object {...}", data)

    def wrong(self, key: str, wanted: str, found: Any) -> FluidxError:
        where = ".".join(filter(None, (self.path, key))) or "the file"
        shown = found if isinstance(found, str) and found.startswith("{") else repr(found)
        return FluidxError(f"cluster file {self.file}: {where} {wanted}, got {shown}")

    def end(self, known: tuple[str, ...]) -> None:
        """Refuse keys that are not known."""
        if unknown := next((key for key in self.data if key not in known), None):
            where = self.path or "the file"
            raise FluidxError(f"cluster file {self.file}: {where} has an unknown key {unknown!r}; {nearest(unknown, known, 'it may have')}")

    def get(self, key: str) -> Any:
        if key not in self.data:
            where = ".".join(filter(None, (self.path, key)))
            near = nearest(key, set(self.data) - {key}) if self.data else ""
            hint = f"; {near}" if near.startswith("did you") else "; fluidx clusters dgx-a100 --json shows a whole file"
            raise FluidxError(f"cluster file {self.file}: {where} is missing{hint}")
        return self.data[key]

    def part(self, key: str) -> _JsonPart:
        return _JsonPart(self.get(key), ".".join(filter(None, (self.path, key))), self.file)

    def optional(self, key: str, read: Callable[[str], Any]) -> Any:
        """null, or what `read` finds. Only to_host may be left out."""
        if key == "to_host" and key not in self.data:
            return None
        return None if self.get(key) is None else read(key)

    def text(self, key: str) -> str:
        if not isinstance(found := self.get(key), str) or not found.strip():
            raise self.wrong(key, "must be a text", found)
        return found

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        found = self.get(key) if default is None else self.data.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self.wrong(key, f"must be an integer, {least} or more", found)
        return found

    def figure(self, key: str, least: float = 0.0, most: float = inf) -> Figure:
        self.get(key)
        part = self if isinstance(self.data[key], dict) else None
        if part is None:
            raise self.wrong(key, f"must be a number with its source, {_FIGURE}", self.data[key])
        found = self.part(key)
        found.end(Figure._fields)
        value, spread = found.get("value"), found.data.get("spread", 0.0)
        limits = "above 0" if not least else f"{least:g} or more"
        limits += f" and at most {most:g}" if most < inf else ""
        if not _is_number(value) or value < least or value <= 0 or value > most:
            raise found.wrong("value", f"must be a number {limits}", value)
        if not _is_number(spread) or spread < 0:
            raise found.wrong("spread", "must be a number, 0 or more (0.1 is 10 %)", spread)
        return Figure(float(value), found.text("source"), float(spread))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


# -- writing ------------------------------------------------------------------------------------------------------------------------------


def as_json(hardware: Hardware) -> dict[str, Any]:
    """The JSON form of the figures of a machine, which from_json reads to an equal record.

    >>> from_json(as_json(load("p5")), "p5.json") == load("p5")
    True
    """
    return _plain({key: value for key, value in vars(hardware).items() if key != "measured" or value is not None})


def _plain(value: Any) -> Any:
    if isinstance(value, Figure):
        return {key: v for key, v in value._asdict().items() if key != "spread" or v}
    if isinstance(value, SwitchFigures):
        return _plain(value._asdict())
    if isinstance(value, (Device, LinkFigures)):
        return {key: _plain(v) for key, v in vars(value).items() if v not in (None, {}) and not (key in ("cores", "call_bytes") and not v)}
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    return value


def save(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write the figures of a machine to a JSON file, which `load` reads."""
    try:
        Path(path).write_text(json.dumps(as_json(hardware), indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise FluidxError(f"cannot write the cluster file {path}: {e.strerror}; give a file in a folder that exists") from None
