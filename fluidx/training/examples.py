"""Examples of a training: arrays, or batches of a Python iterator, checked against the inputs of a model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..ir import ANY, Variable
from ..ir.dtypes import kept, np_dtype
from ..ir.errors import nearest
from ..onnx.errors import OnnxError
from ..onnx.losses import Loss
from ..onnx.model import OnnxModel
from ..onnx.normalize import fed_names
from .data_files import arrays_of_columns, claimed_columns, columns_as_before, is_table, read_columns, read_named_arrays, shape_text
from .ragged import Ragged, Values, examples_of

Feeds = dict[str, np.ndarray]
Columns = dict[str, Values]


class Arrays:
    """Examples in arrays with equally many rows: all rows, or those in `at`. Arrays that are mapped files are read batch by batch."""

    def __init__(self, feeds: Columns, at: np.ndarray | None = None):
        self.feeds, self.at = feeds, np.arange(rows_of(feeds)) if at is None else at
        self.rows = len(self.at)

    def steps(self, batch: int) -> int:
        return -(-self.rows // batch)

    def batches(self, batch: int, seed: int | None = None, epoch: int = 0) -> Iterator[Feeds]:
        """All examples, in an order that the seed and the epoch determine; without a seed in theirs."""
        order = self.at if seed is None else self.at[np.random.default_rng((seed, epoch)).permutation(self.rows)]
        for k in range(0, self.rows, batch):
            yield {n: np.asarray(a[order[k : k + batch]]) for n, a in self.feeds.items()}

    def describe(self, batch: int) -> str:
        return f"{self.rows} examples"

    def split(self, share: float, seed: int) -> tuple[Arrays, Arrays]:
        """The examples to train on, and those that are held back."""
        held = round(self.rows * share)
        if not 0 < held < self.rows:
            raise OnnxError(f"--val-split {share:g} of {self.rows} examples leaves {self.rows - held} to train on and {held} to validate")
        order = self.at[np.random.default_rng(seed).permutation(self.rows)]
        return Arrays(self.feeds, order[held:]), Arrays(self.feeds, order[:held])

    def with_nan(self) -> str:
        """An array that holds NaN, in words; "" if none does."""
        for n, a in self.feeds.items():
            if a.dtype.kind == "f" and (bad := np.isnan(a.values if isinstance(a, Ragged) else a)).any():
                at = int(np.argwhere(bad)[0][0])
                return f"array {n!r} of the data holds NaN, first in example {(a.where(at) if isinstance(a, Ragged) else at) + 1}"
        return ""


class Batches:
    """Batches that a function yields, as dicts of arrays. It is called for each epoch, with its number if it takes one."""

    def __init__(self, name: str, steps: int | None, check: Callable[[Mapping[str, Values], str], Columns]):
        self.name, self.check = name, check
        self.make = _function(name)
        self._steps = steps if steps is not None else self._length()

    def _length(self) -> int:
        made = self._iterable(0)
        if not hasattr(made, "__len__"):
            raise OnnxError(f"{self.name} returns {type(made).__name__}, which has no len(); --steps says how many batches an epoch has")
        return len(made)

    def _iterable(self, epoch: int) -> Any:
        takes = [p for p in inspect.signature(self.make).parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        made = self.make(epoch) if takes else self.make()
        if not isinstance(made, Iterable):
            raise OnnxError(f"{self.name} returns {type(made).__name__}; it must return an iterable of batches, dicts of arrays")
        return made

    def steps(self, batch: int) -> int:
        return self._steps

    def batches(self, batch: int, seed: int | None = None, epoch: int = 0) -> Iterator[Feeds]:
        k = -1
        for k, fed in zip(range(self._steps), self._iterable(epoch)):
            if not isinstance(fed, Mapping):
                raise OnnxError(f"batch {k + 1} of {self.name} is a {type(fed).__name__}; give dicts of arrays, {{'label': ...}}")
            what = f"batch {k + 1} of {self.name}"
            found = self.check({n: examples_of(a, f"{n!r} in {what}") for n, a in fed.items()}, what)
            yield {n: a[:] for n, a in found.items()}
        if k + 1 < self._steps:
            raise OnnxError(f"{self.name} gave {k + 1} batches in epoch {epoch + 1}, and an epoch has {self._steps}; see --steps")

    def describe(self, batch: int) -> str:
        return f"batches of {self.name}"

    def split(self, share: float, seed: int) -> tuple[Arrays, Arrays]:
        raise OnnxError("--val-split needs arrays to choose from, and --data gives batches; give validation examples with --val")

    def with_nan(self) -> str:
        return ""


Examples = Arrays | Batches


def _function(name: str) -> Callable[..., Any]:
    """The function `package.module:function`, from the current folder or installed."""
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as e:
        if e.name is None or not module.startswith(e.name):
            raise
        raise OnnxError(f"--data {name}: there is no module {e.name!r} here or on Python's path, and no file of that name") from None
    if not callable(found):
        raise OnnxError(f"--data {name}: module {module!r} has no function {function!r}")
    return found


def rows_of(feeds: Mapping[str, Values]) -> int:
    return len(next(iter(feeds.values())))


def equal_rows(rows: Mapping[str, int], source: str) -> int:
    """The number of rows that all arrays have."""
    if len(set(rows.values())) != 1 or 0 in rows.values():
        has = ", ".join(f"{n} has {r}" for n, r in rows.items())
        raise OnnxError(f"the arrays of {source} must have equally many rows (not 0): {has}")
    return next(iter(rows.values()))


class Padding(NamedTuple):
    """How examples of several lengths become batches: the number at the end of the shorter ones, by input (else 0), and a number of which
    lengths are multiples."""

    values: Mapping[str, float] = {}
    multiple: int = 1


class ExampleReader:
    """Reads examples for a model and a loss. `classes` are the names of classes, if the first examples have labels that are text: labels
    that are read later are looked up by name. Later tables have the columns of the first one."""

    def __init__(
        self, model: OnnxModel, loss: Loss, scores: Variable, labels: Variable, label: str = "label",
        columns: Mapping[str, Sequence[str]] | None = None, padding: Padding | None = None,
    ):  # fmt: skip
        """`scores` are what the loss takes, `labels` the variable of the labels, and `label` is their name in files."""
        self.padding = padding or Padding()
        self.model, self.loss, self.scores, self.labels, self.label, self.columns = model, loss, scores, labels, label, columns or {}
        self.classes: list[str] | None = None
        self._first_labels = ""  # where labels were read first
        self._claimed: Mapping[str, Sequence[str]] | None = None  # the columns of the first table
        self.given = fed_names(model.proto.graph)
        if label in self.given:
            raise OnnxError(f"the model has an input {label!r}, so the labels must have another name: give it with --label NAME")
        inputs = dict(zip(self.given, model.feeds, strict=True))
        inputs = {n: v for n, v in inputs.items() if any(v.name in op.input_arg_names for op in model.program.ops)}
        _check_open(inputs)
        self.wanted = inputs | {label: labels}  # by the names that arrays have in files
        if unknown := next((n for n in self.padding.values if n not in inputs), None):
            own = f"labels get the ignored one, {loss.ignore_index}" if unknown == label else nearest(unknown, inputs, "it has")
            raise OnnxError(f"--pad {unknown}={self.padding.values[unknown]}: the model has no input {unknown!r}; {own}")
        _check_padding(self.padding, inputs)

    def read(self, source: str, steps: int | None = None) -> Examples:
        """The examples of a file, a folder or `module:function`. Raises OnnxError if they do not fit the model."""
        path = Path(source)
        if not path.exists() and ":" in source:
            return Batches(source, steps, self.feeds)
        if not path.exists():
            raise OnnxError(f"{source}: there is no such file or folder")
        if is_table(path):
            return Arrays(self.feeds(self._of_table(path), source))
        return Arrays(self.feeds(read_named_arrays(path), source))

    def _of_table(self, path: Path) -> dict[str, Values]:
        columns = read_columns(path, text=None if self.classes is None else self.label)
        claimed: Mapping[str, Sequence[str]] = claimed_columns(path, columns, self.wanted, self.label, self.columns)
        if self._claimed is not None:
            claimed = columns_as_before(path, claimed, self._claimed)
        found = arrays_of_columns(path, columns, self.wanted, self.label, claimed)
        self._claimed = self._claimed or claimed
        return found

    def feeds(self, arrays: Mapping[str, Values], source: str) -> Columns:
        """The arrays by names of the program. Raises OnnxError if they do not fit the model."""
        rest = set(arrays).difference(self.given, (v.name for v in self.model.feeds))
        fed = dict[str, Values]()
        for name, v in self.wanted.items():
            key = name if name in arrays else v.name
            if key not in arrays:
                raise OnnxError(self._missing(name, v, arrays, source))
            rest.discard(key)
            found = arrays[key]
            is_label = v is self.labels
            if v.ndim > 1 and v.shape[1] == ANY and found.ndim > 1 and found.shape[1] % self.padding.multiple:
                found = found if isinstance(found, Ragged) else Ragged.of(found)
            if isinstance(found, Ragged):
                fed[v.name] = self._of_several_lengths(name, found, v, source)
            else:
                fed[v.name] = as_feed(name, self._numbers(found, source) if is_label else found, v, is_label)
        if rest:
            name = min(rest)
            near = nearest(name, self.wanted, "wanted are")
            raise OnnxError(f"{source} has an array {name!r}, but nothing in the model has that name; {near}")
        equal_rows({n: len(a) for n, a in fed.items() if a.ndim}, source)
        given = fed[self.labels.name]
        self._check_classes(given.values if isinstance(given, Ragged) else given)
        return fed

    def _of_several_lengths(self, name: str, found: Ragged, v: Variable, source: str) -> Ragged:
        """Examples in the dtype of the variable, which are padded: labels with the ignored one."""
        is_label, head = v is self.labels, self.loss.head
        least, most = int(found.lengths.min()), int(found.lengths.max())
        of = f"array {name!r} of {source} has {least} to {most} elements in an example"
        if v.ndim < 2 or v.shape[1] != ANY:
            raise OnnxError(f"{of}, and {shape_text(v)} is expected{'' if is_label else _opening(name, v)}")
        if is_label and head.class_axis is None:
            raise OnnxError(f"{of}; labels of --loss {self.loss.name} must have equally many, because it ignores none that are padded")
        values = self._numbers(found.values, source) if is_label else found.values
        pad = np.asarray(self.loss.ignore_index if is_label else self.padding.values.get(name, "" if values.dtype.kind in "UO" else 0))
        try:
            pad = kept(pad, np_dtype(v.dtype)) if pad.dtype.kind != "U" else pad
        except ValueError as e:
            raise OnnxError(f"--pad {name}={pad}: {shape_text(v)} cannot be padded with it: it {e}") from None
        return found.with_values(as_feed(name, values[None], v, is_label)[0], pad, self.padding.multiple)

    def _missing(self, name: str, v: Variable, arrays: Mapping[str, Values], source: str) -> str:
        has = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in arrays.items()) or "none"
        others = [n for n in arrays if n not in self.wanted]
        close = nearest(name, others) if others else ""
        hint = f"np.savez(path, {', '.join(f'{n}=...' for n in self.wanted)}) writes such a file"
        if close.startswith("did you mean"):
            hint = f"{close.replace('did you mean', 'is it')} then save it as {name!r}"
        return f"{source} has no array {name!r}, which is {shape_text(v)}; it has {has}; {hint}"

    def _numbers(self, labels: np.ndarray, source: str) -> np.ndarray:
        """Labels as numbers; if they are names of classes, the numbers of these."""
        is_text, first = labels.dtype.kind in "UO", self._first_labels
        self._first_labels = first or source
        if is_text and first and self.classes is None:
            raise OnnxError(
                f"the labels of {source} are text, such as {str(labels.ravel()[0])!r}, and those of {first} are numbers; write both as "
                "numbers, or both as text"
            )
        return self._ids(labels, source) if is_text or self.classes is not None else labels

    def _ids(self, names: np.ndarray, source: str) -> np.ndarray:
        """The numbers of classes that are given by name."""
        found = sorted({str(n) for n in names.ravel()})
        if self.loss.head.class_axis is None and not (self.loss.head.yes_or_no and len(found) == 2):
            raise OnnxError(f"the labels of {source} are text, such as {found[0]!r}, and --loss {self.loss.name} takes numbers")
        if self.classes is None:
            self.classes = found
        place = {name: k for k, name in enumerate(self.classes)}
        if unknown := next((n for n in found if n not in place), None):
            raise OnnxError(f"class {unknown!r} of {source} is not in the examples to train on, which have {', '.join(self.classes[:16])}")
        return np.vectorize(lambda n: place[str(n)], otypes=["int64"])(names)

    def _check_classes(self, label: np.ndarray) -> None:
        axis = self.loss.head.class_axis
        if axis is None:
            return
        classes = self.scores.shape[axis]
        counted = label[label != self.loss.ignore_index] if self.loss.head.counts_labels else label
        if not counted.size:
            return
        least, most = int(counted.min()), int(counted.max())
        if least >= 0 and not most >= classes > 0:
            return
        way_out = f"; --head {most + 1} gives it a last layer for all classes" if least >= 0 else ""
        if 0 < least and most - least < classes:
            way_out = f"; labels count from 0: save label - {least}" + way_out.replace("; ", ", or ")
        if self.classes is not None:
            found = f"the labels are {most + 1} classes, {', '.join(self.classes[:_SHOWN])}{', ...' * (most >= _SHOWN)}"
        else:
            found = f"labels go from {least} to {most}"
        raise OnnxError(f"{found}, but the model has {classes} classes: 0 to {classes - 1}{way_out}")


_SHOWN = 8


def _check_padding(padding: Padding, inputs: Mapping[str, Variable]) -> None:
    """Raise OnnxError for an input to pad whose examples all have one length."""
    fixed = [n for n, v in inputs.items() if v.ndim < 2 or v.shape[1] != ANY]
    if one := next((n for n in padding.values if n in fixed), None):
        v = inputs[one]
        raise OnnxError(f"--pad {one}={padding.values[one]}: {shape_text(v)} has no open length to fill up; leave it out{_opening(one, v)}")
    if padding.multiple > 1 and len(fixed) == len(inputs):
        raise OnnxError(
            f"--pad-to-multiple-of {padding.multiple}: the model has no input of several lengths, but "
            f"{', '.join(f'{n} {shape_text(v)}' for n, v in inputs.items())}; leave it out"
        )


def _opening(name: str, v: Variable) -> str:
    opened = "x".join(["?" if k == 1 or d == ANY else str(d) for k, d in enumerate(v.shape)])
    return f"; if the model takes several lengths, --shapes {name}={opened} opens the axis" if v.ndim > 1 else ""


def _check_open(inputs: Mapping[str, Variable]) -> None:
    """Refuse a model without an input that takes batches of any size."""
    fixed = next(((name, v) for name, v in inputs.items() if v.ndim and v.shape[0] != ANY), None)
    if fixed is None or any(v.ndim and v.shape[0] == ANY for v in inputs.values()):
        return
    name, v = fixed
    opened = "x".join(["?", *("?" if d == ANY else str(d) for d in v.shape[1:])])
    raise OnnxError(f"the model fixes the batch: input {name!r} is {shape_text(v)}; --shapes {name}={opened} opens it")


def as_feed(name: str, a: np.ndarray, v: Variable, is_label: bool) -> np.ndarray:
    """An array in the dtype of the variable that it feeds."""
    if is_label and a.ndim == v.ndim - 1 and v.shape[-1] == 1:
        a = a[..., None]
    try:
        a = kept(a, np_dtype(v.dtype))
    except ValueError as e:
        found, wanted = f"{a.dtype}{list(a.shape)}", shape_text(v)
        raise OnnxError(f"array {name!r} is {found}, and {wanted} is expected: it {e}{_hint(name, a, v, is_label)}") from None
    if not _fits(a.shape, v):
        raise OnnxError(
            f"array {name!r} has shape {list(a.shape)}, and {shape_text(v)} is expected, one row an example{_hint(name, a, v, is_label)}"
        )
    return a


def _fits(shape: Sequence[int], v: Variable) -> bool:
    return len(shape) == v.ndim and all(d in (have, ANY) for d, have in zip(v.shape[1:], shape[1:], strict=True))


def _hint(name: str, a: np.ndarray, v: Variable, is_label: bool) -> str:
    """A hint how to make an array fit, or "" if there is none."""
    if a.dtype.kind == "f" and v.dtype.startswith("int") and not np.isfinite(a).all():
        k = int(np.argwhere(~np.isfinite(a))[0][0])
        return f"; example {k + 1} has {a[k].ravel()[~np.isfinite(a[k].ravel())][0]}: write an integer there, or leave the example out"
    if is_label and v.shape[-1] == 1 and a.ndim == v.ndim and a.shape[-1] > 1:
        return f"; of one-hot labels save {name}.argmax(axis=-1)"
    if _fits(a.shape, v):
        return f"; save {name}.astype({v.dtype!r})" if a.dtype.kind == "f" and v.dtype.startswith("int") else ""
    if a.ndim == v.ndim > 2 and _fits(np.moveaxis(a, -1, 1).shape, v):
        return f"; its channels stand last: save np.moveaxis({name}, -1, 1)"
    if a.ndim and ANY not in v.shape[1:] and a.size and a[0].size == np.prod(v.shape[1:], dtype=np.int64):
        return f"; save {name}.reshape({[-1, *v.shape[1:]]})"
    return ""
