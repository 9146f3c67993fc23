"""Arrays in mapped files: views, ranges that are read, and files that become shorter."""

import os

import numpy as np
import pytest

from fluidx.ir import mapped_file
from fluidx.ir.constants import Array
from fluidx.ir.mapped_file import FileRange, MappedFile


@pytest.fixture
def numbers(tmp_path):
    """The file of the numbers 0 to 99, and it mapped."""
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(100, dtype="float32").tobytes())
    with path.open("rb") as stream:
        return path, MappedFile.of(stream.fileno())


def test_an_array_is_a_view_that_cannot_be_written_and_an_attribute_does_not_copy_it(numbers):
    array = numbers[1].array(40, (9, 10), np.dtype("float32"))
    assert array[0, 0] == 10 and not array.flags.writeable
    held = Array(array)
    assert np.shares_memory(held.values, array) and held.in_file.offset == 40
    assert held == Array(np.arange(10, 100, dtype="float32").reshape(9, 10))  # by digest


def test_views_with_gaps_and_arrays_in_memory_have_no_place_in_a_file(numbers):
    array = numbers[1].array(0, (10, 10), np.dtype("float32"))
    assert FileRange.of(array[:, :5]) is None and FileRange.of(array.copy()) is None
    assert FileRange.of(array[3:]).offset == 120


@pytest.mark.parametrize("block", [8, 12, 1 << 20])
def test_a_range_is_read_in_blocks_and_converted(numbers, monkeypatch, block):
    monkeypatch.setattr(mapped_file, "_BLOCK", block)
    place = FileRange.of(numbers[1].array(0, (10, 10), np.dtype("float32")))
    for dtype in ("float32", "float64", "float16"):
        out = np.empty((2, 4), dtype)
        place.read_into(out, 30)
        assert out.tolist() == [[30, 31, 32, 33], [34, 35, 36, 37]]
    assert b"".join(map(bytes, place.blocks())) == numbers[0].read_bytes()


def test_a_private_mapping_is_written_and_the_file_stays(numbers):
    path, mapped = numbers
    mine = np.frombuffer(mapped.private(), "float32")
    mine[:] = 7
    assert mapped.array(0, (100,), np.dtype("float32"))[99] == 99
    assert np.frombuffer(path.read_bytes(), "float32")[99] == 99


def test_a_replaced_file_changes_nothing_and_a_shortened_one_is_an_error(numbers):
    path, mapped = numbers
    place = FileRange.of(mapped.array(0, (100,), np.dtype("float32")))
    os.rename(path, path.with_name("old"))
    path.write_bytes(bytes(400))
    out = np.empty(100, "float32")
    place.read_into(out)
    assert out[99] == 99
    os.truncate(path.with_name("old"), 200)
    with pytest.raises(OSError, match="a file of weights ends at byte 200, expected 200 more: it was shortened while it was in use"):
        place.read_into(out)


def test_released_pages_are_read_again(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(np.arange(1 << 16, dtype="int32").tobytes())
    with path.open("rb") as stream:
        array = MappedFile.of(stream.fileno()).array(4, ((1 << 16) - 1,), np.dtype("int32"))
    assert array[-1] == 65535
    FileRange.of(array).release()
    assert array.sum(dtype=np.int64) == 65535 * 32768
