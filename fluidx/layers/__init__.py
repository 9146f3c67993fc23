"""Layers: functions that append operators to the default main program and return their results, as in fluid.

Names and order of arguments are those of fluid 1.8. Arguments that only choose an implementation in fluid (`use_cudnn`, `is_sparse`, ...)
have no effect. An argument that would change a result raises ProgramError if it is not supported.
"""

from __future__ import annotations

from inspect import isfunction
from typing import Any

from ..fluid_names import answer, missing
from ..ir import errors
from . import (
    activation,
    arrays,
    compare,
    control_flow,
    conv,
    creation,
    declare,
    experts,
    if_else,
    image,
    indexing,
    io,
    loss,
    math,
    mesh,
    metric,
    nn,
    norm,
    parts,
    python,
    recurrent,
    selection,
    static_rnn,
    tensor,
)
from .activation import *  # noqa: F403
from .arrays import *  # noqa: F403
from .compare import *  # noqa: F403
from .control_flow import *  # noqa: F403
from .conv import *  # noqa: F403
from .creation import *  # noqa: F403
from .declare import *  # noqa: F403
from .experts import *  # noqa: F403
from .fluid_helper import LayerHelper
from .if_else import *  # noqa: F403
from .image import *  # noqa: F403
from .indexing import *  # noqa: F403
from .io import *  # noqa: F403
from .loss import *  # noqa: F403
from .math import *  # noqa: F403
from .mesh import *  # noqa: F403
from .metric import *  # noqa: F403
from .nn import *  # noqa: F403
from .norm import *  # noqa: F403
from .parts import *  # noqa: F403
from .python import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .selection import *  # noqa: F403
from .static_rnn import *  # noqa: F403
from .tensor import *  # noqa: F403

# learning-rate schedules live in fluidx.lr_scheduler; fluid offers them as layers too
_SCHEDULES = (
    "autoincreased_step_counter", "cosine_decay", "exponential_decay", "inverse_time_decay", "linear_lr_warmup", "natural_exp_decay",
    "noam_decay", "piecewise_decay", "polynomial_decay",
)  # fmt: skip

_MODULES = (
    activation, arrays, compare, control_flow, conv, creation, declare, experts, if_else, image, indexing, io, loss, math, mesh, metric, nn,
    norm, parts, python, recurrent, selection, static_rnn, tensor,
)  # fmt: skip
__all__ = ["LayerHelper", *_SCHEDULES, *(name for module in _MODULES for name in module.__all__)]

# wrapped here and not in the modules, because layers call one another
globals().update({name: errors.explains_arguments(layer) for name in __all__ if isfunction(layer := globals().get(name))})


def _answer_of_op(name: str) -> str | None:
    """What to write instead of an operator of fluid 1.8; None for a name that is not fluid's."""
    return answer("layers", name) or (f"layers.{name} writes it" if name in __all__ else None)


errors.fluid_op = _answer_of_op


def __getattr__(name: str) -> Any:
    if name in _SCHEDULES:
        from .. import lr_scheduler

        return getattr(lr_scheduler, name)
    if name == "learning_rate_scheduler":
        from .. import lr_scheduler

        return lr_scheduler
    raise missing("layers", name, __all__, "layer")
