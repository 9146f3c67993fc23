"""Objects of a user's module that texts name: "package.module:name"."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..ir.errors import TranspileError


def imported(path: str, label: str) -> Any:
    """The object that "package.module:name" names. Raises TranspileError, which begins with `label`, if there is none.

    >>> imported("math:inf", "number 'math:inf'")
    inf
    >>> imported(":inf", "number ':inf'")
    Traceback (most recent call last):
    fluidx.ir.errors.TranspileError: number ':inf': '' is no name of a module; write package.module:name
    """
    module, _, attribute = path.partition(":")
    if not all(word.isidentifier() for word in module.split(".")):
        raise TranspileError(f"{label}: {module!r} is no name of a module; write package.module:name")
    try:
        found: Any = import_module(module)
    except ImportError as e:
        raise TranspileError(f"{label}: cannot import {module!r}: {e}; write package.module:name") from None
    for word in attribute.split("."):
        found = getattr(found, word, None)
    if found is None:
        raise TranspileError(f"{label}: {module} has no {attribute!r}; write package.module:name")
    return found
