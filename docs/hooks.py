"""What mkdocs.yml cannot say by itself: the version of fluidx beside its name, and the pages that are made from the code."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fluidx import __version__

_LINE = re.compile(r'(<span id="__span-[0-9-]+")>((?:<a [^>]*></a>)?(?:<span class="[a-z]+">)?( +))')
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]+)</code>")
_SIGN = re.compile(r"(?:::|[/.,(=])(?=\w)")
_SIGN_IN_LONG_NAMES = re.compile(r"(?:::|[/.,(=_])(?=\w)")


def on_config(config: Any) -> Any:
    config.site_name = f"fluidx {__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, text in made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """What css/site.css needs: lines of code say how far in they begin, and names in tables where they may be broken."""
    html = _LINE.sub(lambda m: f'{m[1]} style="--indent: {len(m[3])}ch">{m[2]}', html)
    return _CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), html)


def _breakable(code: re.Match[str]) -> str:
    name = code[1]
    sign = _SIGN_IN_LONG_NAMES if max(map(len, name.split())) > 40 else _SIGN
    return f"<code>{sign.sub(lambda s: f'{s[0]}<wbr>', name)}</code>"


def made() -> dict[str, str]:
    """Page -> its text, of the pages that scripts in this folder make."""
    sys.path.insert(0, str(Path(__file__).parent))
    ops, onnx_ops, api, example = map(import_module, ("make_ops", "make_onnx_ops", "make_api", "make_page"))
    return {"ops.md": ops.page(), "onnx_ops.md": onnx_ops.page(), "example_page.html": example.page(), **api.pages()}
