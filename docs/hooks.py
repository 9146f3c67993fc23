"""What mkdocs.yml cannot say by itself: the version of fluidx beside its name, and the pages that are made from the code."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fluidx import __version__

# page -> the module in this folder whose `page()` is its text
MADE = {"ops.md": "make_ops", "onnx_ops.md": "make_onnx_ops"}


def on_config(config: Any) -> Any:
    config.site_name = f"fluidx {__version__}"
    return config


def on_files(files: Any, config: Any) -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    for name, module in MADE.items():
        files.append(File.generated(config, name, content=import_module(module).page()))
    return files
