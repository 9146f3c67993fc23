"""Look-up in tables of keys and values, which may be strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.dtypes import FLOATS, INTS, SHORT, np_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Control
from ...ir.opdef import OpDef, Required, Sample
from ..shared.arrays import to_host
from ..shared.tables import table_values


def _fit(dtype: str, values: Any) -> bool:
    """Do these values have the dtype, in the form that attributes store?"""
    kinds: Any = str if dtype == "string" else int if dtype in INTS else (int, float) if dtype in FLOATS else ()
    return isinstance(values, tuple) and all(isinstance(v, kinds) and not isinstance(v, bool) for v in values)


class LookUp(OpDef):
    """For each element of X the one of `values` at its position in `keys`, otherwise `default`, as `dtype`. NaN equals NaN here."""

    name = "look_up"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("string",))
    inputs = ("X",)
    attrs = {"keys": Required(Any), "values": Required(Any), "default": Required(Any), "dtype": Required(str)}
    pattern = "* -> *"

    @staticmethod
    def infer(x, *, keys, values, default, dtype):
        if dtype not in SHORT:
            raise ProgramError(f"op look_up: there is no dtype {dtype!r}")
        for what, of, found in (("keys", x.dtype, keys), ("values", dtype, values), ("default", dtype, (default,))):
            if not _fit(of, found):
                raise ProgramError(f"op look_up: {what} must be of {of}, found {found!r:.80}")
        if len(keys) != len(values):
            raise ProgramError(f"op look_up: there must be as many values as keys, found {len(values)} for {len(keys)}")
        return x.with_dtype(dtype)

    @staticmethod
    def kernel(xp, x, *, keys, values, default, dtype):
        found = table_values(to_host(xp, x), keys, np.array(values, np_dtype(dtype)), default)
        return found if x.dtype.kind == "O" or dtype == "string" else xp.asarray(found)

    @staticmethod
    def samples():
        yield Sample.of(np.array([[3, 7, 9], [7, 3, 3]]), keys=(7, 3), values=(0.5, -1.0), default=2.0, dtype="float32")
        yield Sample.of(np.array([1.5, np.nan, 2], "float32"), keys=(float("nan"), 1.5), values=(4, 5), default=-1, dtype="int64")
