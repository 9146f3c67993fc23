"""Files of examples: .npz, folders of .npy files, CSV and Parquet. Arrays have the names of inputs; columns are put together to arrays."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ..ir import ANY, Variable
from ..ir.errors import install, nearest
from ..onnx.arrays import read_array, read_arrays
from ..onnx.errors import OnnxError
from .ragged import Ragged, Values, examples_of, same_or_ragged

TABLES = (".csv", ".tsv", ".parquet")
_DELIMITERS = ",;\t"
_QUOTED = re.compile(r'"[^"]*("|$)')
_SOME = 8  # names that a message lists


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def read_named_arrays(path: Path) -> dict[str, Values]:
    """The arrays of an .npz file, or of the .npy files of a folder. Those of a folder are mapped, not read. Arrays of arrays are examples
    of several lengths."""
    if not path.is_dir():
        return {name: examples_of(a, f"array {name!r} of {path}") for name, a in read_arrays(path, objects=True).items()}
    files = sorted(path.glob("*.npy"))
    if not files:
        raise OnnxError(f"{path} has no .npy files; np.save({str(path / 'NAME.npy')!r}, array) writes one for each input and for the label")
    return {file.stem: _mapped(file) for file in files}


def _mapped(file: Path) -> Values:
    try:
        return np.asanyarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, OSError):  # of text and the like, of arrays of arrays, and of arrays without elements
        return examples_of(read_array(file, objects=True), str(file))


# -- tables -------------------------------------------------------------------------------------------------------------------


def read_columns(path: Path, text: str | None = None) -> dict[str, Values]:
    """The columns of a table, by name: integers, floats (an empty cell is NaN), several numbers in each cell, or text. The cells of column
    `text` are text, whatever they hold."""
    columns = _parquet_columns(path) if path.suffix.lower() == ".parquet" else _csv_columns(path, text)
    if not columns or not len(next(iter(columns.values()))):
        raise OnnxError(f"{path} has no rows" if columns else f"{path} has no columns")
    return columns


def _csv_columns(path: Path, text: str | None) -> dict[str, Values]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(_DELIMITERS, key=_QUOTED.sub("", first).count)
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
    return {name: _words(cells) if name == text else _column(path, name, cells) for name, cells in zip(names, zip(*rows[1:]))}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _column(path: Path, name: str, cells: Sequence[str]) -> Values:
    """Cells as numbers, if all are numbers or empty; as several numbers, if all have numbers; else as text."""
    try:
        return np.array([int(c) for c in cells], "int64")
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(c) if c.strip() else np.nan for c in cells])
    except ValueError:
        pass
    lists = [c.replace(",", " ").split() for c in cells]
    if all(words and all(map(_is_number, words)) for words in lists):
        return same_or_ragged([_column(path, name, words) for words in lists], f"column {name!r} of {path}")
    return _words(cells)


def _words(cells: Sequence[str | None]) -> np.ndarray:
    return np.array(["" if c is None else str(c).strip() for c in cells])


def _parquet_columns(path: Path) -> dict[str, Values]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise OnnxError(f"Parquet files need the package pyarrow: {e}; {install('parquet')}") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pa.ArrowException) as e:
        raise OnnxError(f"{path} cannot be read: {e}") from None
    found = dict[str, Values]()
    for name, column in zip(table.column_names, table.columns):
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        array = column.to_numpy()
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
        if is_list and any(row is None for row in array):
            raise OnnxError(f"column {name!r} of {path} has no list in example {next(k for k, row in enumerate(array, 1) if row is None)}")
        rows = same_or_ragged([*array], f"column {name!r} of {path}") if is_list else array
        found[name] = _words(array) if not is_list and array.dtype.kind == "O" else rows
    return found


# -- arrays of columns ----------------------------------------------------------------------------------------------------------


def claimed_columns(
    path: Path, columns: Mapping[str, Values], wanted: Mapping[str, Variable], label: str, chosen: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """The columns of each input, and of the labels, whose name in `wanted` is `label`.

    An input `x` is the column `x`, or the columns `x.0`, `x.1`, ... (also `x_0`, `x[0]`, `x0`) in the order of the numbers, or those that
    `chosen` names for it. The one input that has no such columns is all columns that are left, in their order.
    """
    labels = _columns_of(path, columns, label)
    others = [c for c in columns if c not in labels]
    claimed = {name: _chosen(path, others, name, patterns) for name, patterns in chosen.items()}
    claimed[label] = labels
    if not labels:
        has = [*columns][:_SOME]
        raise OnnxError(
            f"{path} has no column {label!r} with the labels; {nearest(label, columns, 'its columns are')}; --label NAME names the column"
            if len(columns) <= _SOME
            else f"{path} has no column {label!r} with the labels; it has {', '.join(has)}, ...; --label NAME names the column"
        )
    if wrong := next((name for name in chosen if name not in wanted), None):
        raise OnnxError(f"--columns {wrong}=...: the model has no input {wrong!r}; {nearest(wrong, wanted, 'it has')}")
    for name in wanted:
        if name not in claimed and (own := _columns_of(path, columns, name)):
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
    return claimed


def columns_as_before(path: Path, claimed: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The columns of each input in the order that those of an earlier table have. Raises OnnxError if they are not the same ones."""
    return {name: _in_order(path, name, own, before[name]) if name in before else own for name, own in claimed.items()}


def _in_order(path: Path, name: str, own: Sequence[str], before: Sequence[str]) -> Sequence[str]:
    places, expected = {_place(c, name): c for c in own}, [_place(c, name) for c in before]
    if places.keys() == set(expected):
        return [places[key] for key in expected]
    if {name} in (places.keys(), {*expected}) and all(key == name or isinstance(key, int) for key in (*places, *expected)):
        return own  # one column of several numbers, and numbered columns
    lacks = ", ".join(repr(c) for c in before if _place(c, name) not in places)
    more = ", ".join(repr(c) for key, c in places.items() if key not in expected)
    found = " and ".join([f"no {lacks}"] * bool(lacks) + [f"{more} in addition"] * bool(more))
    raise OnnxError(
        f"{path} must have the columns of the examples to train on, which for input {name!r} are {', '.join(before[:_SOME])}"
        f"{', ...' * (len(before) > _SOME)}; it has {found}; rename its columns, or choose with --columns {name}=COLUMN,COLUMN"
    )


def arrays_of_columns(
    path: Path, columns: Mapping[str, Values], wanted: Mapping[str, Variable], label: str, claimed: Mapping[str, Sequence[str]]
) -> dict[str, Values]:
    """An array for each input, and one for the labels, of the columns that they claim."""
    for c in claimed[label]:
        _check_labels(path, c, columns[c])
    found = dict[str, Values]()
    for name, v in wanted.items():
        own, is_label = claimed[name], name == label
        if is_label and len(own) == 1:
            found[name] = _labels(columns[own[0]], v, f"column {own[0]!r} of {path}")
        else:
            found[name] = _stacked(path, columns, name, v, own, is_label)
    return found


def _check_labels(path: Path, name: str, given: Values) -> None:
    cells = given.values if isinstance(given, Ragged) else given
    empty = cells == "" if cells.dtype.kind == "U" else np.isnan(cells) if cells.dtype.kind == "f" else np.zeros(0)
    if empty.any():
        at = int(np.argwhere(empty)[0][0])
        k = given.where(at) if isinstance(given, Ragged) else at
        row = f"example {k + 1}" if path.suffix.lower() == ".parquet" else f"row {k + 2}"
        raise OnnxError(f"{row} of {path} has no label: its cell in column {name!r} is empty; fill it in, or remove the row")


def _labels(found: Values, v: Variable, what: str) -> Values:
    """One column of labels; whole numbers are integers where the loss takes those, and cells of text are the words of its positions."""
    if isinstance(found, Ragged):
        return found
    if found.dtype.kind in "UO" and found.ndim == 1 and v.ndim > 1 and v.shape[1] == ANY:
        return same_or_ragged([_words(str(cell).split()) for cell in found], what)
    whole = found.dtype.kind == "f" and v.dtype.startswith("int") and np.isfinite(found).all() and (found == np.rint(found)).all()
    return found.astype("int64") if whole else found


def _chosen(path: Path, columns: Sequence[str], name: str, patterns: Sequence[str]) -> list[str]:
    found = []
    for pattern in patterns:
        like = [c for c in columns if fnmatchcase(c, pattern)]
        if not like:
            raise OnnxError(f"--columns {name}={pattern}: {path} has no such column; {nearest(pattern, columns, 'it has')}")
        found += [c for c in like if c not in found]
    return found


def _columns_of(path: Path, columns: Mapping[str, Values], name: str) -> list[str]:
    """The column of that name, or the numbered ones, in the order of their numbers."""
    if name in columns:
        return [name]
    numbers: dict[int, str] = {}
    for c in columns:
        k = _place(c, name)
        if isinstance(k, int) and numbers.setdefault(k, c) != c:
            raise OnnxError(f"{path} has two columns number {k} for {name!r}: {numbers[k]!r} and {c!r}; rename one of them")
    return [numbers[k] for k in sorted(numbers)]


def _place(column: str, name: str) -> int | str:
    """The number that a column of input `name` has; the column itself if it has none."""
    m = re.fullmatch(re.escape(name) + r"[._\[]?(\d+)\]?", column)
    return int(m[1]) if m else column


def _stacked(path: Path, columns: Mapping[str, Values], name: str, v: Variable, own: Sequence[str], labels: bool) -> Values:
    """The columns side by side, in the shape of the variable."""
    what = "the label" if labels else f"input {name!r}"
    text = [c for c in own if columns[c].dtype.kind in "UO"]
    if text and not v.dtype.startswith("str"):
        value = columns[text[0]][:1].ravel()[0]
        raise OnnxError(
            f"column {text[0]!r} of {path} has text, {str(value)!r} in its first row, and {what} takes {v.dtype}; write it as "
            f"numbers, or choose other columns: --columns {name}=COLUMN,COLUMN"
        )
    ragged = next((c for c in own if isinstance(columns[c], Ragged)), None)
    if ragged is not None and len(own) == 1:
        return columns[ragged]
    if ragged is not None:
        raise OnnxError(
            f"column {ragged!r} of {path} has several lengths, so it cannot stand beside the other columns of {what}, which are "
            f"{', '.join(own[:_SOME])}; --columns {name}={ragged} takes it alone"
        )
    parts = [np.asarray(columns[c][:]).reshape(len(columns[c]), -1) for c in own]
    found = np.concatenate(parts, axis=1)
    row = v.shape[1:]
    if ANY not in row and found.shape[1] != int(np.prod(row)):
        some = ", ".join(own[:_SOME]) + ", ..." * (len(own) > _SOME)
        raise OnnxError(
            f"{path} has {found.shape[1]} numbers for {what}, which takes {int(np.prod(row))}: {shape_text(v)}. They are {some}; "
            f"--columns {name}=COLUMN,COLUMN chooses others"
        )
    return found.reshape(len(found), *row) if ANY not in row else found


def shape_text(v: Variable) -> str:
    return f"{v.dtype}[{','.join('?' if d == ANY else str(d) for d in v.shape)}]"
