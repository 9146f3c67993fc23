"""What mkdocs.yml cannot say by itself: the version of fluidx beside its name."""

from __future__ import annotations

from typing import Any

from fluidx import __version__


def on_config(config: Any) -> Any:
    config.site_name = f"fluidx {__version__}"
    return config
