"""Var: the immutable declaration of a variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import ProgramError, nearest
from .types import REPLICATE, Placement

_NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


class Var(NamedTuple):
    """The immutable declaration of a variable: name, type, placement and flags. A Variable is the handle on it.

    `attrs` holds what only some variables have: of a parameter `trainable`, `learning_rate`, `regularizer`, `need_clip`, and
    `do_model_average` where that is False; of an
    optimizer's state the parameter that it is for, `state_of`; of a variable whose gradient is clipped, `error_clip`; of a value that is
    computed again, what it was called the first time, `copy_of`; of one whose open sizes change while a program runs, `resized`;
    of a value that a model file has in another dtype, that dtype, `saved_as`.
    """

    name: str
    type: Any  # a ValueType; Any, since most code deals with tensors only and reads the shape
    placement: Placement = REPLICATE
    persistable: bool = False
    stop_gradient: bool = False
    is_data: bool = False
    is_parameter: bool = False
    attrs: Mapping[str, Any] = _NO_ATTRS
    on_host: bool = False  # the value is in host memory, not in the memory of the rank's device

    def __hash__(self) -> int:  # attrs cannot be hashed
        return hash((self.name, self.type, self.placement))

    def changed(self, **changes: Any) -> Var:
        return self._replace(**changes)


# The default attributes of a parameter, which text does not show.
PARAM_DEFAULTS: Mapping[str, Any] = {"learning_rate": 1.0, "need_clip": True, "regularizer": None, "trainable": True}
VAR_ATTRS = (*PARAM_DEFAULTS, "do_model_average", "error_clip", "state_of", "copy_of", "resized", "saved_as")


def check_attrs(name: str, attrs: Iterable[str]) -> None:
    """Raise ProgramError for an attribute that no variable has."""
    for attr in attrs:
        if attr not in VAR_ATTRS:
            raise ProgramError(f"variable {name!r} cannot have the attribute {attr!r}; {nearest(attr, VAR_ATTRS, 'it may have')}")
