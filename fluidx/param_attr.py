"""ParamAttr: the options of a parameter that a layer creates."""

from __future__ import annotations

from copy import copy
from typing import Any

from ._checks import number, one_of, whole, wrong
from .initializer import Initializer
from .ir import Placement, Shard, show_placement
from .ir.errors import explains_arguments


class ParamAttr:
    """Name, initial value and training options of one parameter.

    Wherever a layer takes `param_attr` or `bias_attr`, None stands for the defaults, a string for a name, an initializer for a
    parameter initialized by it, and False (for a bias) for no parameter at all.

    `learning_rate` multiplies the optimizer's; `regularizer` is `regularizer.L1Decay(c)`, `regularizer.L2Decay(c)` or the pair
    ("l1", c) / ("l2", c) and overrides the optimizer's; `trainable=False` freezes the parameter; `need_clip=False` keeps its gradient
    out of gradient clipping. `placement=Shard(1, "tp")` cuts the parameter along an axis over the ranks
    of a mesh axis (`fx.Mesh`); one device takes no notice. `do_model_average=False` keeps it out of `optimizer.ModelAverage`.

    >>> ParamAttr(name="w", learning_rate=0.5, regularizer=("l2", 1e-4)).record()
    {'learning_rate': 0.5, 'regularizer': ('l2', 0.0001), 'need_clip': True}
    """

    @explains_arguments
    def __init__(
        self,
        name: str | None = None,
        initializer: Initializer | None = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
        do_model_average: bool = True,
        need_clip: bool = True,
        placement: Any = None,
    ):
        if name is not None and (not isinstance(name, str) or not name):
            raise wrong(f"ParamAttr: name must be a non-empty string or None, got {name!r}")
        if initializer is not None and not isinstance(initializer, Initializer):
            raise wrong(f"ParamAttr: initializer must come from fluidx.initializer, got {type(initializer).__name__}: {initializer!r}")
        self.name = name
        self.initializer = initializer
        self.learning_rate = number("ParamAttr", "learning_rate", learning_rate)
        self.regularizer = regularizer_record(regularizer)
        if trainable not in (True, False):
            raise wrong(f"ParamAttr: trainable must be True or False, got {trainable!r}")
        self.trainable = bool(trainable)
        self.do_model_average = bool(do_model_average)
        self.need_clip = bool(need_clip)
        self.placement: Placement = cuts("ParamAttr", placement)

    def record(self) -> dict[str, Any]:
        """The entries of the program's parameter record, besides `trainable`: plain numbers, strings and tuples."""
        own = {} if self.do_model_average else {"do_model_average": False}
        return {"learning_rate": self.learning_rate, "regularizer": self.regularizer, "need_clip": self.need_clip, **own}

    def named(self, name: str) -> ParamAttr:
        """The same attributes under another name."""
        twin = copy(self)
        twin.name = name
        return twin

    def cut(self, placement: Placement) -> ParamAttr:
        """The same attributes with another placement."""
        twin = copy(self)
        twin.placement = placement
        return twin

    @staticmethod
    def of(value: Any) -> ParamAttr | None:
        """The ParamAttr for `value`; None means no parameter.

        >>> ParamAttr.of("w").name, ParamAttr.of(None).name, ParamAttr.of(False)
        ('w', None, None)
        """
        if isinstance(value, ParamAttr):
            return value
        if value is None or value is True:
            return _PLAIN
        if value is False:
            return None
        if isinstance(value, str):
            return ParamAttr(name=value)
        if isinstance(value, Initializer):
            return ParamAttr(initializer=value)
        if isinstance(value, tuple) or hasattr(value, "record"):
            return ParamAttr(regularizer=value)
        found = f"{type(value).__name__}: {value!r}"
        raise wrong(f"a parameter attribute must be a ParamAttr, a name, an initializer, None or False, got {found}")

    def __repr__(self) -> str:
        shown = {"name": self.name, "initializer": self.initializer, "trainable": self.trainable, **self.record()}
        if self.placement:
            shown["placement"] = self.placement
        default = {
            "name": None, "initializer": None, "trainable": True, "learning_rate": 1.0, "regularizer": None, "need_clip": True,
            "placement": None,
        }  # fmt: skip
        return f"ParamAttr({', '.join(f'{k}={v!r}' for k, v in shown.items() if v != default[k])})"


class WeightNormParamAttr(ParamAttr):
    """A parameter as a length and a direction, which are trained instead of it: w = g * v / |v| (Salimans & Kingma, 2016).

    `dim` is the axis along which each slice has a length of its own; None gives one length to all. The two parameters are called as
    the one would be, plus `_v` and `_g`; the startup program gives g the length of v, so that w begins as v.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     _ = fx.layers.fc(fx.data("x", [None, 3], "float32"), 2, param_attr=fx.WeightNormParamAttr(dim=1, name="w"), bias_attr=False)
    >>> main.all_parameters()
    [<Parameter w_v: f32[3,2], persistable>, <Parameter w_g: f32[1,2], persistable>]
    """

    def __init__(
        self,
        dim: int | None = None,
        name: str | None = None,
        initializer: Initializer | None = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
        do_model_average: bool = False,
        need_clip: bool = True,
    ):
        super().__init__(name, initializer, learning_rate, regularizer, trainable, do_model_average, need_clip)
        self.dim = None if dim is None else whole("WeightNormParamAttr", "dim", dim)

    def part(self, name: str) -> ParamAttr:
        """The attributes of one of the two parameters."""
        return ParamAttr(
            name, self.initializer, self.learning_rate, self.regularizer, self.trainable, self.do_model_average, self.need_clip
        )


def cuts(label: str, placement: Any) -> tuple[Shard, ...]:
    """The shards of a placement that a user gave: a Shard, a list of them, or None."""
    entries = tuple(placement) if isinstance(placement, (list, tuple)) else () if placement is None else (placement,)
    if not all(isinstance(e, Shard) for e in entries):
        raise wrong(f"{label}: placement must be a Shard such as Shard(1, 'tp'), a list of them, or None, got {placement!r}")
    entries = tuple(
        [Shard(whole(label, "the axis of a placement", e.axis), e.group, whole(label, "the unit of a placement", e.unit)) for e in entries]
    )
    if len({e.group for e in entries}) < len(entries):
        raise wrong(f"{label}: placement {show_placement(entries)} names a group twice; a group cuts one axis")
    if any(e.unit < 1 for e in entries):
        raise wrong(f"{label}: placement {show_placement(entries)}: the unit of a shard must be at least 1")
    return entries


def regularizer_record(value: Any) -> tuple[str, float] | None:
    """A regularizer as it is stored in a parameter's record: ("l1" | "l2", coefficient), or None."""
    if value is None:
        return None
    pair = value.record() if hasattr(value, "record") else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise wrong(f"regularizer must be L1Decay, L2Decay, a pair like ('l2', 0.0001) or None, got {type(value).__name__}: {value!r}")
    kind, coefficient = pair
    return one_of("ParamAttr", "regularizer", kind, ("l1", "l2")), number("ParamAttr", "regularizer's coefficient", coefficient)


_PLAIN = ParamAttr()  # what None stands for
