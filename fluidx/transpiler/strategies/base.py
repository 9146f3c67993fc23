"""The class Strategy (a name, options, and named steps, each a pass), and `strategy()`, which makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypedDict, Unpack

from ...ir.dtypes import HALVES
from ...ir.errors import TranspileError, misspelt, nearest
from ...ir.pass_base import Pass
from ...ir.unique_name import unused
from ...ir.variable import Variable
from ..algorithms import BUILT_IN, Algorithm, CollectiveSequence
from ..algorithms.selection import selected
from ..passes.broadcast import BroadcastStartup
from ..passes.bucket import Bucket
from ..passes.carry import Carry
from ..passes.groups import InitGroups
from ..passes.hosts import OverHosts
from ..passes.lower import Lower
from ..passes.offload import Offload
from ..passes.place import Place
from ..passes.rings import Rings
from ..passes.wire import Wire
from ..placement.parameter_homes import EVERYWHERE, Reshard
from .pipeline_text import show_pass, show_stage

Steps = tuple[tuple[str, Pass], ...]
BUCKETS = Bucket()
OWN: dict[str, tuple[str, ...]] = {}  # by strategy of the catalogue: the options that it has beside the common ones


@dataclass(frozen=True)
class Strategy:
    """A strategy: a name with options, and named steps, each a pass. `repr` is the calls that make it.

    A strategy is data: `before`, `after` and `replace` give a new one, and steps are found by their names: groups, place, startup,
    lower, bucket, hosts, carry, and those that a strategy adds.

    >>> from fluidx.transpiler.strategies import data_parallel
    >>> data_parallel().steps_named()
    ['groups', 'place', 'startup', 'lower', 'bucket', 'hosts', 'carry']
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    steps: Steps
    servers: int = 0  # ranks that follow the trainers
    keep: bool = True  # do they keep parameters, or only add up?
    first: int = 0  # the number of steps before the strategy's own
    # the name in texts if it differs, and what this name includes: the steps before the strategy's own, and the number of `changes`
    called: tuple[str, Steps, int] = ("", (), 0)

    # the calls that changed its steps since it was made: as text, and whether they changed more than the steps before its own
    changes: tuple[tuple[str, bool], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for step, one in self.steps:
            if not isinstance(one, Pass):
                raise TranspileError(f"{self.name}: step {step!r} must be a pass, an instance of a transpiler.Pass, got {one!r}")

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, in order."""
        return tuple(p for _, p in self.steps)

    def steps_named(self) -> list[str]:
        """The names of the steps, in order."""
        return [n for n, _ in self.steps]

    def before(self, step: str, one: Pass, name: str = "") -> Strategy:
        """The same strategy with a pass before a step."""
        return self._insert("before", step, self._find(step), one, name)

    def after(self, step: str, one: Pass, name: str = "") -> Strategy:
        """The same strategy with a pass after a step."""
        return self._insert("after", step, self._find(step) + 1, one, name)

    def replace(self, step: str, one: Pass) -> Strategy:
        """The same strategy with another pass as that step."""
        at = self._find(step)
        made = replace(self, steps=(*self.steps[:at], (step, one), *self.steps[at + 1 :]))
        return self._noted(made, f".replace({step!r}, {one!r})")

    def as_made(self) -> Strategy:
        """The same strategy; its name and options stand for the steps that it has now."""
        return replace(self, changes=())

    @property
    def call(self) -> str:
        """The call that makes the strategy, with its rewrites but without other changed steps: what programs and errors name."""
        return self._named(lambda v: v.call if isinstance(v, Strategy) else repr(v)) + self._rewritten

    @property
    def _rewritten(self) -> str:
        return f".with_rewrites({', '.join(map(repr, self.rewrites))})" if self.rewrites else ""

    def _named(self, show: Callable[[Any], str]) -> str:
        return f"{self.name}({', '.join(f'{k}={show(v)}' for k, v in self.options)})"

    def _noted(self, made: Strategy, call: str) -> Strategy:
        return replace(made, changes=(*self.changes, (call, made.steps[made.first :] != self.steps[self.first :])))

    def _insert(self, how: str, step: str, at: int, one: Pass, name: str) -> Strategy:
        named = f", name={name!r}" if name else ""
        return self._noted(self._with(at, self._new(one, name)), f".{how}({step!r}, {one!r}{named})")

    @property
    def rewrites(self) -> tuple[Pass, ...]:
        """The passes before the strategy's own steps; they rewrite the program for one device."""
        return self.passes[: self.first]

    def with_rewrites(self, *rewrites: Pass) -> Strategy:
        """The same strategy with more passes before its own steps, after the rewrites that it already has.

        >>> import fluidx as fx
        >>> print(fx.strategies.zero1(bucket_mb=4).with_rewrites(fx.rewrite.JoinAttention()))
        zero1{bucket_mb=4},join_attention
        """
        made = self
        for one in rewrites:
            made = made._with(made.first, (made._free(one), one))
        return self._noted(made, f".with_rewrites({', '.join(map(repr, rewrites))})") if rewrites else self

    def _free(self, one: Pass) -> str:
        """The name of a rewrite as a step, which no other step has."""
        return unused(type(one).__name__, self.steps_named(), "_{}".format)

    def _is_rewritten(self, included: int, changes: int) -> bool:
        """Do changes behind the first `changes` only add rewrites, as `with_rewrites` does behind the first `included` ones?"""
        if any(own for _, own in self.changes[changes:]):
            return False
        made = replace(self, steps=(*self.steps[:included], *self.steps[self.first :]), first=included)
        for step, one in self.steps[included : self.first]:
            if step != made._free(one):
                return False
            made = made._with(made.first, (step, one))
        return True

    def __str__(self) -> str:
        """The text form, which strategies.get and --strategy take; `repr` if an option has no text form, if an algorithm of one's own is
        not named "module:name", or if other steps were changed than rewrites before the strategy's own steps."""
        text, included, changes = self.called
        if self.steps[: len(included)] != included:
            text, included, changes = "", (), 0
        own = dict(self.options).get("algorithm", "")
        # another process does not know the name under which an algorithm is registered in this one
        hidden = not text and isinstance(own, str) and ":" not in own and own not in ("", "auto", *BUILT_IN)
        if hidden or not self._is_rewritten(len(included), changes):
            return repr(self)
        try:
            stages = [text or show_stage(self.name, dict(self.options)), *map(show_pass, self.rewrites[len(included) :])]
        except TranspileError:
            return repr(self)
        return ",".join(stages)

    def _with(self, at: int, step: tuple[str, Pass]) -> Strategy:
        """The same strategy with one more step."""
        return replace(self, steps=(*self.steps[:at], step, *self.steps[at:]), first=self.first + (at <= self.first))

    def _new(self, one: Pass, name: str) -> tuple[str, Pass]:
        name = name or type(one).__name__
        if name in self.steps_named():
            raise TranspileError(f"{self!r} has a step {name!r} already; give the pass another name: name=...")
        return name, one

    def _find(self, step: str) -> int:
        names = self.steps_named()
        if step not in names:
            raise TranspileError(f"{self!r} has no step {step!r}; {nearest(step, names, 'it has')}")
        return names.index(step)

    def __repr__(self) -> str:
        return self._named(repr) + (self._rewritten if self._is_rewritten(0, 0) else "".join(call for call, _ in self.changes))


class Common(TypedDict, total=False):
    """The options that every strategy takes.

    `loss` names the loss, if it must be checked; `strict` refuses communication that the strategy itself does not ask for. `algorithm` says
    how collectives are carried out: a name (see algorithms/), an Algorithm of your own or "module:name" of one, a table by collective,
    group and size (algorithms/selection.py), "auto", or "" for the communicator's own. `hierarchical`: True, False, or "auto", which means
    True if there are several hosts. `wire`: the dtype in which gradients travel, "float16" or "bfloat16", or "" for their own dtype; they
    are multiplied by `wire_scale` before and divided by it afterwards (see passes/wire.py for the default scale). `cpu_offload` stores
    sharded parameters and the optimizer's state in host memory, and updates them there (passes/offload.py). `rings`: how many communicators
    NCCL has for each group; collectives go over them in turns (passes/rings.py).
    """

    loss: Any
    strict: bool
    algorithm: str | Algorithm | CollectiveSequence | Mapping[Any, Any]
    hierarchical: bool | str
    wire: str
    wire_scale: float | None
    cpu_offload: bool
    rings: int


def no_option(name: str, option: str, own: Sequence[str]) -> TranspileError:
    """The error for an unknown option: it suggests the nearest option, or else lists the strategy's own options and then the common
    ones."""
    if near := misspelt(option, (*own, *Common.__annotations__)):
        return TranspileError(f"{name} has no option {option!r}; did you mean {near!r}?")
    shared = ", ".join(Common.__annotations__)
    has = f"it has: {', '.join(own)}; and as every strategy: {shared}" if own else f"it has those of every strategy: {shared}"
    return TranspileError(f"{name} has no option {option!r}; {has}")


def strategy(
    name: str, update: Any = None, options: Mapping[str, Any] | None = None, schedule: Steps = (), rest: Any = EVERYWHERE,
    reshard: Reshard = True, own: bool = False, bucket: Bucket = BUCKETS, usual: str = "", carried: tuple[str, ...] = (),
    **common: Unpack[Common],
) -> Strategy:  # fmt: skip
    """A strategy from its choices: where parameters are updated and stored (see placement/parameter_homes.py and Place), what is sent in
    one message, how collectives are carried out, and the passes that schedule the result.

    `options` are its own, as `repr` shows them. `usual` is its default algorithm for the collectives `carried`, () for all; the other
    collectives are left to the communicator, or are hierarchical if there are several hosts.
    """
    own_options = options or {}
    for option in common:
        if option not in Common.__annotations__:
            raise no_option(name, option, OWN.get(name, tuple(own_options)))
    loss, strict = common.get("loss"), common.get("strict", False)
    algorithm, hierarchical = selected(common.get("algorithm", usual), name), common.get("hierarchical", "auto")
    if loss is not None and not isinstance(loss, (str, Variable)):
        raise TranspileError(f"{name}: loss is a Variable or the name of one, got {loss!r}")
    if not isinstance(strict, bool):
        raise TranspileError(f"{name}: strict is True or False, got {strict!r}")
    loss = loss.name if isinstance(loss, Variable) else loss or ""
    if hierarchical not in (True, False, "auto"):
        raise TranspileError(f"{name}: hierarchical must be True, False or 'auto', got {hierarchical!r}")
    wire, scale, offload = common.get("wire", ""), common.get("wire_scale"), common.get("cpu_offload", False)
    if wire not in ("", *HALVES):
        raise TranspileError(f"{name}: unknown wire={wire!r}; {nearest(str(wire), HALVES, 'there are')}")
    if scale is not None and not (wire and isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < inf):
        raise TranspileError(f"{name}: wire_scale is a number above 0, for wire={' or '.join(map(repr, HALVES))}; got {scale!r}")
    if not isinstance(offload, bool):
        raise TranspileError(f"{name}: cpu_offload is True or False, got {offload!r}")
    if isinstance(rings := common.get("rings", 1), bool) or not isinstance(rings, int) or rings < 1:
        raise TranspileError(f"{name}: rings is a number of communicators for each group, 1 or more, got {rings!r}")
    steps: Steps = (
        ("groups", InitGroups()),
        ("place", Place(update, rest, reshard, strict=strict, loss=loss, own=own)),
        ("startup", BroadcastStartup()),
        ("lower", Lower()),
        ("bucket", bucket),
        *((("wire", Wire(wire, scale if scale is None else float(scale))),) if wire else ()),
        ("hosts", OverHosts(hierarchical, algorithm, carried if hierarchical == "auto" else ())),
        ("carry", Carry(algorithm, carried)),
        *schedule,
        *((("offload", Offload()),) if offload else ()),
        *((("rings", Rings(rings)),) if rings > 1 else ()),
    )
    path = common.get("algorithm")
    named = path if isinstance(path, str) and ":" in path else algorithm  # a module is known in every process
    given = (
        ("algorithm", named, usual), ("hierarchical", hierarchical, "auto"), ("wire", wire, ""), ("wire_scale", scale, None),
        ("cpu_offload", offload, False), ("rings", rings, 1), ("strict", strict, False), ("loss", loss, ""),
    )  # fmt: skip
    shown = {**own_options, **{option: value for option, value, default in given if value != default}}
    return Strategy(name, tuple(shown.items()), steps)


def changed(function: Callable[..., Strategy], **options: Any) -> dict[str, Any]:
    """The options that differ from the defaults of a strategy: those that its call must show."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if value != known[name].default}


def buckets(name: str, bucket_mb: float, first_bucket_mb: float, late: tuple[str, ...] = ()) -> Bucket:
    """The Bucket pass for a strategy's options. Raises TranspileError for invalid sizes."""
    for option, value, least in (("bucket_mb", bucket_mb, "0 or more"), ("first_bucket_mb", first_bucket_mb, "above 0")):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (value >= 0 if least == "0 or more" else value > 0):
            raise TranspileError(f"{name}: {option} must be a number of MiB, {least}, got {value!r}")
    return Bucket(float(bucket_mb), float(min(first_bucket_mb, bucket_mb)), late=late)
