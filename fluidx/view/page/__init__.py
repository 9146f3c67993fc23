"""A program as one page of HTML that scales: groups that open, search, before and after side by side, the life of a parameter.

The page loads nothing from elsewhere. Its data are made here (model.py); page.js draws them, with places from dagre (dagre.min.js, under
the MIT licence in dagre.LICENSE.txt).
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from .model import page_model

__all__ = ["html", "page_model"]


def html(shown: Any, path: str | Path | None = None) -> str:
    """A page about a program, a pair, a list of rank programs, or a transpiler, whose page has the program before beside it.

    Returns the page; with `path` it is written there too, and the path is returned.

    >>> import fluidx as fx
    >>> page = html(fx.Program("empty"))
    >>> page[:15], "https://" in page
    ('<!doctype html>', False)
    """
    model = page_model(shown)
    text = json.dumps(model, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": escape(str(model["name"])),
        "css": _file("page.css"),
        "model": text.replace("<", "\\u003c"),  # nothing in it can end the element
        "dagre": _file("dagre.min.js"),
        "script": _file("page.js"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], _file("page.html"))
    if path is None:
        return page
    Path(path).write_text(page, encoding="utf-8")
    return str(path)


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
