"""Var, the immutable record of what a program declares under one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import ProgramError, nearest
from .types import REPLICATE, Placement

_NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


class Var(NamedTuple):
    """The immutable record behind a Variable: what the program declares under one name.

    `attrs` holds what only some variables have: of a parameter `trainable`, `learning_rate`, `regularizer`, `need_clip`, and
    `do_model_average` where that is False; of an
    optimizer's state the parameter that it is for, `state_of`; of a variable whose gradient is clipped, `error_clip`; of a value that is
    computed again, what it was called the first time, `copy_of`; of one whose open sizes change while a program runs, `resized`.
    """

    name: str
    type: Any  # a ValueType; those who deal with tensors alone take it for a TensorType, and are told where it is none
    placement: Placement = REPLICATE
    persistable: bool = False
    stop_gradient: bool = False
    is_data: bool = False
    is_parameter: bool = False
    attrs: Mapping[str, Any] = _NO_ATTRS
    on_host: bool = False  # it lives in the memory of the host, and not in that of the device which its rank works on

    def __hash__(self) -> int:  # attrs cannot be hashed
        return hash((self.name, self.type, self.placement))

    def changed(self, **changes: Any) -> Var:
        return self._replace(**changes)


# A parameter's attributes that go without saying.
PARAM_DEFAULTS: Mapping[str, Any] = {"learning_rate": 1.0, "need_clip": True, "regularizer": None, "trainable": True}
VAR_ATTRS = (*PARAM_DEFAULTS, "do_model_average", "error_clip", "state_of", "copy_of", "resized")


def check_attrs(name: str, attrs: Iterable[str]) -> None:
    """Raise ProgramError for an attribute that no variable has."""
    for attr in attrs:
        if attr not in VAR_ATTRS:
            raise ProgramError(f"variable {name!r} cannot have the attribute {attr!r}; {nearest(attr, VAR_ATTRS, 'it may have')}")
