"""Files of examples: .npz, folders of .npy files, CSV and Parquet. Arrays have the names of inputs; columns are put together to arrays."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ..ir import ANY, Variable
from ..ir.errors import install, nearest
from ..onnx.arrays import read_array, read_arrays
from ..onnx.errors import OnnxError

TABLES = (".csv", ".tsv", ".parquet")
_DELIMITERS = ",;\t"
_SOME = 8  # names that a message lists


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def read_named_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or of the .npy files of a folder. Those of a folder are mapped, not read."""
    if not path.is_dir():
        return read_arrays(path)
    files = sorted(path.glob("*.npy"))
    if not files:
        raise OnnxError(f"{path} has no .npy files; np.save({str(path / 'NAME.npy')!r}, array) writes one for each input and for the label")
    return {file.stem: _mapped(file) for file in files}


def _mapped(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):  # of text and the like, and of arrays without elements
        return read_array(file)


# -- tables -------------------------------------------------------------------------------------------------------------------


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a table, by name: integers, floats (an empty cell is NaN), several numbers in each cell, or text."""
    columns = _parquet_columns(path) if path.suffix.lower() == ".parquet" else _csv_columns(path)
    if not columns or not len(next(iter(columns.values()))):
        raise OnnxError(f"{path} has no rows" if columns else f"{path} has no columns")
    return columns


def _csv_columns(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(_DELIMITERS, key=first.count)
            rows = [row for row in csv.reader(stream, delimiter=delimiter) if row]
    except UnicodeDecodeError as e:
        raise OnnxError(f"{path} is not a CSV file: byte {e.start} is not UTF-8 text") from None
    except (OSError, csv.Error) as e:
        raise OnnxError(f"{path} cannot be read: {e}") from None
    if not rows:
        raise OnnxError(f"{path} is empty; its first line names the columns, and each other line is an example")
    names = [name.strip() for name in rows[0]]
    if all(_is_number(name) for name in names):
        raise OnnxError(f"the first line of {path} has numbers, {', '.join(names[:4])}; it must name the columns")
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise OnnxError(f"{path} has two columns {twice!r}; give them different names")
    for k, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise OnnxError(f"row {k} of {path} has {len(row)} cells, but the first line names {len(names)} columns")
    if len(rows) == 1:
        return dict.fromkeys(names, np.empty(0))
    return {name: _column(path, name, cells) for name, cells in zip(names, zip(*rows[1:]))}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _column(path: Path, name: str, cells: Sequence[str]) -> np.ndarray:
    """Cells as numbers, if all are numbers or empty; as several numbers, if all are; else as text."""
    try:
        return np.array([int(c) for c in cells])
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(c) if c.strip() else np.nan for c in cells])
    except ValueError:
        pass
    lists = [c.replace(",", " ").split() for c in cells]
    if all(len(words) > 1 and all(map(_is_number, words)) for words in lists):
        return _rectangle(path, name, [_column(path, name, words) for words in lists])
    return np.array([c.strip() for c in cells])


def _rectangle(path: Path, name: str, rows: Sequence[Any]) -> np.ndarray:
    """Rows of equal lengths as one array."""
    if other := next((k for k, row in enumerate(rows) if len(row) != len(rows[0])), 0):
        few, many = len(rows[0]), len(rows[other])
        raise OnnxError(f"column {name!r} of {path} has {many} numbers in example {other + 1}, and {few} in the first; pad them")
    return np.array([np.asarray(row) for row in rows])


def _parquet_columns(path: Path) -> dict[str, np.ndarray]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise OnnxError(f"Parquet files need the package pyarrow: {e}; {install('parquet')}") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as e:
        raise OnnxError(f"{path} cannot be read: {e}") from None
    found = {}
    for name, column in zip(table.column_names, table.columns):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        array = column.to_numpy()
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
        if is_list and any(row is None for row in array):
            raise OnnxError(f"column {name!r} of {path} has no list in example {next(k for k, row in enumerate(array, 1) if row is None)}")
        found[name] = _rectangle(path, name, array) if is_list else array.astype(str) if array.dtype.kind == "O" else array
    return found


# -- arrays of columns ----------------------------------------------------------------------------------------------------------


def arrays_of_columns(
    path: Path, columns: Mapping[str, np.ndarray], wanted: Mapping[str, Variable], label: str, chosen: Mapping[str, Sequence[str]]
) -> dict[str, np.ndarray]:
    """An array for each input, and `label`.

    An input `x` is the column `x`, or the columns `x.0`, `x.1`, ... (also `x_0`, `x[0]`, `x0`), or those that `chosen` names for it. The
    one input that has no such columns is all columns that are left, in their order. `label` is the name of the column of labels.
    """
    labels = _columns_of(columns, label)
    others = [c for c in columns if c not in labels]
    claimed = {name: _chosen(path, others, name, patterns) for name, patterns in chosen.items()}
    claimed["label"] = labels
    if not claimed["label"]:
        has = [*columns][:_SOME]
        raise OnnxError(
            f"{path} has no column {label!r} with the labels; {nearest(label, columns, 'its columns are')}; --label NAME names the column"
            if len(columns) <= _SOME
            else f"{path} has no column {label!r} with the labels; it has {', '.join(has)}, ...; --label NAME names the column"
        )
    if wrong := next((name for name in chosen if name not in wanted), None):
        raise OnnxError(f"--columns {wrong}=...: the model has no input {wrong!r}; {nearest(wrong, wanted, 'it has')}")
    for name in wanted:
        if name not in claimed and (own := _columns_of(columns, name)):
            claimed[name] = own
    without = [name for name in wanted if name not in claimed]
    rest = [c for c in columns if not any(c in own for own in claimed.values())]
    if len(without) == 1 and rest:
        claimed[without[0]] = rest
        without, rest = [], []
    if without:
        raise OnnxError(
            f"{path} has no columns for input {without[0]!r}, which is {shape_text(wanted[without[0]])}; name them {without[0]}.0, "
            f"{without[0]}.1, ..., or give --columns {without[0]}=COLUMN,COLUMN"
        )
    return {name: _stacked(path, columns, name, wanted[name], claimed[name]) for name in wanted}


def _chosen(path: Path, columns: Sequence[str], name: str, patterns: Sequence[str]) -> list[str]:
    found = []
    for pattern in patterns:
        like = [c for c in columns if fnmatchcase(c, pattern)]
        if not like:
            raise OnnxError(f"--columns {name}={pattern}: {path} has no such column; {nearest(pattern, columns, 'it has')}")
        found += [c for c in like if c not in found]
    return found


def _columns_of(columns: Mapping[str, np.ndarray], name: str) -> list[str]:
    if name in columns:
        return [name]
    numbered = re.compile(re.escape(name) + r"[._\[]?(\d+)\]?")
    return [c for c in columns if numbered.fullmatch(c)]


def _stacked(path: Path, columns: Mapping[str, np.ndarray], name: str, v: Variable, own: Sequence[str]) -> np.ndarray:
    """The columns side by side, in the shape of the variable."""
    text = [c for c in own if columns[c].dtype.kind in "UO"]
    if name == "label" and len(own) == 1:
        found = columns[own[0]]
        whole = found.dtype.kind == "f" and v.dtype.startswith("int") and np.isfinite(found).all() and (found == np.rint(found)).all()
        return found.astype("int64") if whole else found
    if text and not v.dtype.startswith("str"):
        value = columns[text[0]][0]
        raise OnnxError(
            f"column {text[0]!r} of {path} has text, {str(value)!r} in its first row, and {what(name)} takes {v.dtype}; write it as "
            f"numbers, or choose other columns: --columns {name}=COLUMN,COLUMN"
        )
    parts = [columns[c].reshape(len(columns[c]), -1) for c in own]
    found = np.concatenate(parts, axis=1)
    row = v.shape[1:]
    if ANY not in row and found.shape[1] != int(np.prod(row)):
        some = ", ".join(own[:_SOME]) + ", ..." * (len(own) > _SOME)
        raise OnnxError(
            f"{path} has {found.shape[1]} numbers for {what(name)}, which takes {int(np.prod(row))}: {shape_text(v)}. They are {some}; "
            f"--columns {name}=COLUMN,COLUMN chooses others"
        )
    return found.reshape(len(found), *row) if ANY not in row else found


def what(name: str) -> str:
    return "the label" if name == "label" else f"input {name!r}"


def shape_text(v: Variable) -> str:
    return f"{v.dtype}[{','.join('?' if d == ANY else str(d) for d in v.shape)}]"
