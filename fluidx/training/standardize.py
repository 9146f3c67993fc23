"""Inputs that the program itself standardizes, (column - mean) / deviation, so that the trained model takes columns as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..ir import ANY, Program
from ..ir.builder import Builder
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from ..onnx.errors import OnnxError
from ..onnx.model import OnnxModel
from .examples import Arrays, Examples
from .ragged import Ragged


class Moments(NamedTuple):
    """The mean and the standard deviation of each column; a column of equal numbers has deviation 1."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    @classmethod
    def of(cls, x: np.ndarray) -> Moments:
        """
        >>> Moments.of(np.array([[1.0, 5.0], [3.0, 5.0]]))
        Moments(means=(2.0, 5.0), deviations=(1.0, 1.0))
        """
        means, deviations = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
        return cls(tuple(means.tolist()), tuple(np.where(deviations > 0, deviations, 1.0).tolist()))


@dataclass(frozen=True)
class Standardize(Pass):
    """Operators read these inputs standardized. `inputs` are pairs (variable, Moments)."""

    inputs: tuple[tuple[str, Moments], ...]
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new, made = program.copy(), dict[str, str]()
        block = new.global_block()
        block.oplist, ops = [], block.oplist
        b = Builder(block)
        b.site = ops[0].site
        for name, of in self.inputs:
            x, shape = block.var(name), (len(of.means),)
            mean = b.assign_value(shape=shape, dtype=x.dtype, values=of.means)
            deviation = b.assign_value(shape=shape, dtype=x.dtype, values=of.deviations)
            made[name] = b.elementwise_div(b.elementwise_sub(x, mean), deviation, name=f"{name}.standardized").name
        block.oplist += [op.renamed(made) for op in ops]
        return new


def standardizing(model: OnnxModel, examples: Examples) -> Standardize:
    """The pass for all inputs that are columns of floats, with the moments of the examples. Raises OnnxError if there are none."""
    if not isinstance(examples, Arrays):
        raise OnnxError("--standardize needs the means of all examples, and --data gives batches; give a file of them")
    read = {n for block in model.program.blocks[1:] for op in block.oplist for n in op.input_arg_names}
    columns = {
        v.name: examples.feeds[v.name] for v in model.feeds
        if v.name in examples.feeds and v.dtype.startswith("float") and v.ndim == 2 and v.shape[1] != ANY and v.name not in read
    }  # fmt: skip
    if not columns:
        raise OnnxError("--standardize: the model has no input of columns, float32[?,N], that could be standardized; leave it out")
    return Standardize(tuple(_moments(columns, examples.at).items()))


def _moments(columns: Mapping[str, np.ndarray | Ragged], rows: np.ndarray) -> dict[str, Moments]:
    found = {name: Moments.of(np.asarray(a[rows])) for name, a in columns.items()}
    for name, of in found.items():
        if bad := [k for k, v in enumerate((*of.means, *of.deviations)) if not np.isfinite(v)]:
            column = bad[0] % len(of.means)
            raise OnnxError(f"--standardize: column {column} of {name!r} has no finite mean: fill in its empty cells, or leave rows out")
    return found
