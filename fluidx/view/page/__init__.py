"""HTML pages for large programs: groups that open, search, before and after side by side, the operators of one parameter.

A page is one file and loads nothing. model.py makes its data; the scripts in this folder draw them, with positions from dagre
(dagre.min.js 3.1.3, under the MIT licence in dagre.LICENSE.txt).
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...ir.program import Program
from ..draw import draw
from .model import page_model

__all__ = ["html", "in_notebook", "page_model"]

_SCRIPTS = ("graph.js", "layout.js", "pane.js", "page.js")  # joined in this order into one scope
_NOTEBOOK_LIMIT = 400_000  # characters; a notebook file stores each output


def html(shown: Any, path: str | Path | None = None) -> str:
    """A page about a program, a pair, a list of rank programs, or a transpiler (with the program for one device beside the others).

    Returns the page. With `path`, the page is written there and the path is returned.

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
        "model": text.replace("<", "\\u003c"),  # the text cannot end the script element
        "dagre": _file("dagre.min.js"),
        "script": "\n".join(map(_file, _SCRIPTS)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], _file("page.html"))
    if path is None:
        return page
    Path(path).write_text(page, encoding="utf-8")
    return str(path)


def in_notebook(shown: Any) -> str:
    """HTML for a notebook cell: the page in a frame; for a large program a small picture, with a note on how to write the page."""
    page = html(shown)
    head = f"<code>{escape(_headline(shown))}</code>"
    if len(page) <= _NOTEBOOK_LIMIT:
        frame = 'sandbox="allow-scripts" style="width:100%;height:560px;border:1px solid #8884;border-radius:4px"'
        return f'{head}<iframe srcdoc="{escape(page)}" {frame}></iframe>'
    picture = draw(shown.pair if hasattr(shown, "pair") else shown, max_ops=24)
    note = "<small>fx.view.html(..., 'page.html') writes a page to look around in</small>"
    return f'{head} {note}<div style="overflow:auto">{picture}</div>'


def _headline(shown: Any) -> str:
    main = shown if isinstance(shown, Program) else shown.main
    return repr(main).strip("<>") + (f", {main.strategy}" if main.strategy else "")


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
