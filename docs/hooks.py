"""What mkdocs.yml cannot say by itself: the version of fluidx beside its name, and the pages that are made from the code."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fluidx import __version__


def on_config(config: Any) -> Any:
    config.site_name = f"fluidx {__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, text in made().items():
        files.append(File.generated(config, name, content=text))
    return files


def made() -> dict[str, str]:
    """Page -> its text, of the pages that scripts in this folder make."""
    sys.path.insert(0, str(Path(__file__).parent))
    ops, onnx_ops, api = map(import_module, ("make_ops", "make_onnx_ops", "make_api"))
    return {"ops.md": ops.page(), "onnx_ops.md": onnx_ops.page(), **api.pages()}
