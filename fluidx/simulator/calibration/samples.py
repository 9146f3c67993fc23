"""The samples in the declarations of ops as programs of a calibration, at three sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ...ir.errors import FluidxError
from ...ir.memory_spaces import pattern_in
from ...ir.opdef import OPS, Effect, OpDef
from ...ir.pattern import Pattern
from ...ir.program import Program
from ...testing.one_operator import program_of_sample
from .programs import CalibrationProgram

SIZES = (1, 64, 2048)  # times the sample's first axis
_SAMPLES = 2  # of each op; others differ from these in attributes that cost nothing


def sampled_ops() -> list[str]:
    """The ops whose samples run on one device.

    >>> ops = sampled_ops()
    >>> "relu" in ops, "all_reduce" in ops, "while" in ops
    (True, False, False)
    """
    return sorted(name for name, d in OPS.items() if _alone(d))


def _alone(d: type[OpDef]) -> bool:
    return d.effect in (Effect.PURE, Effect.RANDOM) and not d.control.beyond_tensors and not d.control.bodies and d.control.bind is None


def sample_programs(names: Sequence[str]) -> Iterator[Callable[[], CalibrationProgram | None]]:
    """Makers of programs of one operator; they return None for a size that the sample does not have."""
    for name in names:
        for sample in islice(OPS[name].samples(), _SAMPLES):
            yield from (partial(_program, name, sample, factor) for factor in SIZES)


def _program(name: str, sample: Any, factor: int) -> CalibrationProgram | None:
    """A program of one operator, with a free axis `factor` times as long; None if the sizes of the sample are in attributes too."""
    main, fetch, feed = program_of_sample(name, sample)
    if factor > 1:
        op, d = main.global_block().oplist[-1], OPS[name]
        p = pattern_in(op, main.global_block())
        if (axis := _free_axis(p)) is None:
            return None
        longer = {n: axes for n, axes in zip(d.flat_slots(op.inputs, d.in_slots), p.ins, strict=True) if n}
        args = [_repeated(slot.name, arg, longer, axis, factor) for slot, arg in zip(d.in_slots, sample.args)]
        wanted = [_grown(main, n, axes, axis, factor) for n, axes in zip(d.flat_slots(op.outputs, d.out_slots), p.outs, strict=True) if n]
        try:
            main, fetch, feed = program_of_sample(name, replace(sample, args=tuple(args)))
        except (FluidxError, ValueError):
            return None
        made = main.global_block()
        if wanted != [made.desc(n).type.shape for n in made.oplist[-1].output_arg_names]:
            return None
    return CalibrationProgram(main, Program(f"{name} startup"), feed, fetch)


def _free_axis(p: Pattern) -> str | None:
    """The first factor of an operand that is an axis alone, and whose size the op does not fix; one that the results have, if there is."""
    alone = [axis[0] for axes in p.ins for axis in axes or () if len(axis) == 1 and axis[0][0] != "." and "/" not in axis[0]]
    made = {axis[0] for axes in p.outs for axis in axes or () if len(axis) == 1}
    return next((f for f in alone if f in made), next(iter(alone), None))


def _repeated(slot: str, arg: Any, axes: Mapping[str, Any], factor: str, times: int) -> Any:
    """An operand, or a list of them, repeated along the axes with a factor."""
    if arg is None:
        return None
    found = []
    for k, a in enumerate(map(np.asarray, arg if isinstance(arg, (list, tuple)) else [arg])):
        for i, axis in enumerate(axes.get(f"{slot}{k}") or ()):
            a = np.concatenate([a] * times, i) if axis == (factor,) else a
        found.append(a)
    return found if isinstance(arg, (list, tuple)) else found[0]


def _grown(main: Program, name: str, axes: Any, factor: str, times: int) -> tuple[int, ...]:
    """The shape of a result where the axes with a factor are longer."""
    shape = main.global_block().desc(name).type.shape
    return tuple([d * times if axis == (factor,) else d for d, axis in zip(shape, axes or [()] * len(shape), strict=True)])
