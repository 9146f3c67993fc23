"""Checks of the arguments of layers and similar functions; every failure is a ProgramError that ends with the user's line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .ir import nearest
from .ir.source_location import wrong


def whole(owner: str, name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int; a float, a bool or a number below `least` is refused.

    >>> whole("layers.fc", "size", np.int64(10))
    10
    """
    if value.__class__ is not int and (isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer))):
        raise wrong(f"{owner}: {name} must be an integer, got {type(value).__name__}: {value!r}")
    if least is not None and value < least:
        raise wrong(f"{owner}: {name} must be {least} or more, got {value}")
    return int(value)


def number(owner: str, name: str, value: Any) -> float:
    """`value` as a float."""
    if value.__class__ is not float and (isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number))):
        raise wrong(f"{owner}: {name} must be a number, got {type(value).__name__}: {value!r}")
    return float(value)


def wholes(owner: str, name: str, value: Any, count: int | None = None, least: int | None = None) -> tuple[int, ...]:
    """A sequence of ints; with `count`, one int stands for `count` equal ones.

    >>> wholes("layers.conv2d", "stride", 2, count=2), wholes("layers.transpose", "perm", [1, 0])
    ((2, 2), (1, 0))
    """
    if not isinstance(value, (list, tuple, Sequence, np.ndarray)) or isinstance(value, str):
        if count is not None and not isinstance(value, str):
            return (whole(owner, name, value, least),) * count
        raise wrong(f"{owner}: {name} must be a list of integers, got {type(value).__name__}: {value!r}")
    items = tuple([whole(owner, f"{name}[{i}]", v, least) for i, v in enumerate(value)])
    if count is not None and len(items) != count:
        raise wrong(f"{owner}: {name} must be an integer or {count} integers, got {list(items)}")
    return items


def one_of(owner: str, name: str, value: Any, options: Iterable[str]) -> str:
    """`value`, which must be one of `options`; the error offers the nearest."""
    options = tuple(options)
    if not isinstance(value, str) or value not in options:
        raise wrong(f"{owner}: unknown {name} {value!r}; {nearest(str(value), options)}")
    return value


def unsupported(owner: str, **given: Any) -> None:
    """Refuse arguments of fluid's signature that fluidx does not support and that would change the result."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise wrong(f"{owner}: {name}={value!r} is not supported; leave it out")
