"""Layers: functions that append operators to the default main program and give back their results, as in fluid.

Argument names and order are fluid 1.8's. Arguments that choose between equivalent implementations there (`use_cudnn`, `is_sparse`, ...)
have no effect here; those that would change a result and are not supported raise ProgramError.
"""

from __future__ import annotations

from typing import Any

from . import compare, control_flow, conv, experts, image, loss, math, mesh, metric, nn, norm, parts, recurrent, selection, tensor
from .compare import *  # noqa: F403
from .control_flow import *  # noqa: F403
from .conv import *  # noqa: F403
from .experts import *  # noqa: F403
from .helper import LayerHelper
from .image import *  # noqa: F403
from .loss import *  # noqa: F403
from .math import *  # noqa: F403
from .mesh import *  # noqa: F403
from .metric import *  # noqa: F403
from .nn import *  # noqa: F403
from .norm import *  # noqa: F403
from .parts import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .selection import *  # noqa: F403
from .tensor import *  # noqa: F403

# learning-rate schedules live in fluidx.lr_scheduler; fluid offers them as layers too
_SCHEDULES = (
    "autoincreased_step_counter", "cosine_decay", "exponential_decay", "inverse_time_decay", "linear_lr_warmup", "natural_exp_decay",
    "noam_decay", "piecewise_decay", "polynomial_decay",
)  # fmt: skip

# fluid's layers over LoD tensors, and what to write of padded sequences instead
_INSTEAD = {
    "dynamic_lstm": "rnn(LSTMCell(size), x, sequence_length=lengths)",
    "dynamic_lstmp": "rnn(cell, x, sequence_length=lengths) with a cell of your own, a class of RNNCell",
    "dynamic_gru": "rnn(GRUCell(size), x, sequence_length=lengths)",
    "DynamicRNN": "rnn(cell, x, sequence_length=lengths) with a cell of your own, a class of RNNCell",
    "StaticRNN": "rnn(cell, x, time_major=True) with a cell of your own, a class of RNNCell",
}

_MODULES = (compare, control_flow, conv, experts, image, loss, math, mesh, metric, nn, norm, parts, recurrent, selection, tensor)
__all__ = ["LayerHelper", *_SCHEDULES, *(name for module in _MODULES for name in module.__all__)]


def __getattr__(name: str) -> Any:
    if name in _SCHEDULES:
        from .. import lr_scheduler

        return getattr(lr_scheduler, name)
    raise AttributeError(_unknown(name))


def _unknown(name: str) -> str:
    from ..ir import nearest

    if name in _INSTEAD:
        return f"fluidx.layers has no layer {name!r}; sequences are padded: write layers.{_INSTEAD[name]}"
    return f"fluidx.layers has no layer {name!r}; {nearest(name, __all__)}" if not name.startswith("__") else name
