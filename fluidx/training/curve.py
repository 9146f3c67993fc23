"""The curve of a training as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..ir.errors import install
from ..onnx.errors import OnnxError
from .loop import Epoch


def draw_curve(epochs: Sequence[Epoch], path: Path) -> None:
    """Draw the losses and scores of epochs as a picture: PNG, SVG or PDF, as the path ends."""
    pyplot = need_matplotlib()
    at = range(1, len(epochs) + 1)
    figure, left = pyplot.subplots(layout="constrained")
    left.plot(at, [e.loss for e in epochs], label="training loss")
    left.set(xlabel="epoch", ylabel="loss")
    left.xaxis.get_major_locator().set_params(integer=True)
    if any(e.val_loss is not None for e in epochs):  # of a training that continues, the first ones may have none
        left.plot(at, [float("nan") if e.val_loss is None else e.val_loss for e in epochs], label="validation loss")
    right = left.twinx() if epochs[-1].val_scores else None
    for name in epochs[-1].val_scores:
        assert right is not None
        right.plot(at, [e.val_scores.get(name, float("nan")) for e in epochs], "--", color="gray", label=f"validation {name}")
        right.set_ylabel(name)
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path)
    pyplot.close(figure)


def need_matplotlib() -> Any:
    """The module that draws. Raises OnnxError if it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        raise OnnxError(f"--curve needs the package matplotlib: {e}; {install('plot')}") from None
    return pyplot
