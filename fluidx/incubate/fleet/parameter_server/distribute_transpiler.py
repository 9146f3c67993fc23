"""fluid's fleet for parameter servers. It is not supported; its names raise an ImportError that names the replacement."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"fluidx has no {name!r} for parameter servers; they are ranks of one job: "
        "fx.DistributeTranspiler(fx.strategies.parameter_server(2)) (docs/strategies.md)"
    )
