"""fluid.framework: programs, places and flags, under the names by which fluid's scripts import them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ._checks import wrong
from .executor import cpu_places, cuda_pinned_places, cuda_places
from .executor.places import is_compiled_with_cuda
from .fluid_names import module_getattr
from .ir import (
    Block,
    Operator,
    Parameter,
    Program,
    Variable,
    as_dtype,
    default_main_program,
    default_startup_program,
    device_guard,
    name_scope,
    program_guard,
)

VERSION = "1.8.5"  # the release of fluid whose names fluidx has


def grad_var_name(var_name: str) -> str:
    """The name of the gradient of a variable.

    >>> grad_var_name("x")
    'x@GRAD'
    """
    return f"{var_name}@GRAD"


def in_dygraph_mode() -> bool:
    """False: programs are static graphs."""
    return False


def require_version(min_version: str, max_version: str | None = None) -> None:
    """Raise ProgramError unless fluid 1.8.5, whose names fluidx has, is from `min_version` to `max_version`.

    >>> require_version("1.6.0")
    """
    found = _numbers("min_version", VERSION)
    if found < _numbers("min_version", min_version):
        raise wrong(f"require_version: at least version {min_version} is required; the names here are those of fluid {VERSION}")
    if max_version is not None and found > _numbers("max_version", max_version):
        raise wrong(f"require_version: at most version {max_version} is required; the names here are those of fluid {VERSION}")


def _numbers(what: str, version: Any) -> tuple[int, ...]:
    parts = version.split(".") if isinstance(version, str) else []
    if not 1 <= len(parts) <= 4 or not all(p.isdigit() for p in parts):
        raise wrong(f"require_version: {what} must be a version such as '1.8.0', got {version!r}")
    return (*map(int, parts), 0, 0, 0, 0)[:4]


# fluid's flags that have a counterpart -> the environment variable of fluidx
_FLAGS = {"FLAGS_check_nan_inf": "FLUIDX_CHECK_NAN"}
_given: dict[str, Any] = {}


def set_flags(flags: Mapping[str, Any]) -> None:
    """Set fluid's global flags. FLAGS_check_nan_inf sets FLUIDX_CHECK_NAN; the others, on memory, cuDNN and threads, have no effect.

    >>> set_flags({"FLAGS_eager_delete_tensor_gb": 0.0})
    >>> get_flags("FLAGS_eager_delete_tensor_gb")
    {'FLAGS_eager_delete_tensor_gb': 0.0}
    """
    if not isinstance(flags, Mapping):
        raise wrong(f"set_flags: flags must be a dict, got {type(flags).__name__}: {flags!r:.60}")
    for name in flags:
        _flag("set_flags", name)
    for name, value in flags.items():
        _given[name] = value
        if name in _FLAGS:
            os.environ[_FLAGS[name]] = str(int(value in (True, 1, "1", "true", "True")))


def get_flags(flags: str | Iterable[str]) -> dict[str, Any]:
    """The values of fluid's global flags, as they were set, else from the environment, else None."""
    names = [flags] if isinstance(flags, str) else list(flags)
    return {_flag("get_flags", n): _given.get(n, os.environ.get(n)) for n in names}


def _flag(owner: str, name: Any) -> str:
    if not isinstance(name, str) or not name.startswith("FLAGS_"):
        raise wrong(f"{owner}: a flag is a name such as 'FLAGS_check_nan_inf', got {name!r}")
    return name


def convert_np_dtype_to_dtype_(np_dtype: Any) -> str:
    """The name of a NumPy dtype, as it is used in programs."""
    return as_dtype(np.dtype(np_dtype))


__all__ = [
    "Block", "Operator", "Parameter", "Program", "Variable", "convert_np_dtype_to_dtype_", "cpu_places", "cuda_pinned_places",
    "cuda_places", "default_main_program", "default_startup_program", "device_guard", "get_flags", "grad_var_name", "in_dygraph_mode",
    "is_compiled_with_cuda", "name_scope", "program_guard", "require_version", "set_flags",
]  # fmt: skip
__getattr__ = module_getattr("framework", __all__)
