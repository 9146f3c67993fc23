"""What collectives share: how a value is cut for the ranks of a group, and from which placement to which a collective goes."""

import numpy as np
import pytest

from fluidx.ir import At, Partial, Pieces, ProgramError, Shard, TensorType, opdef
from fluidx.ir.offsets import Offsets
from fluidx.ops.comm.collective_base import boxes, cut_views, flat_marks, owned_by

SUM, ROWS, COLUMNS, ROOT = Partial("sum", "dp"), Shard(0, "dp"), Shard(1, "dp"), At(1, "dp")
HALVES = Pieces((0, 4, 12), "dp")


def test_parts_of_an_array_are_views_along_an_axis_or_flat_ranges():
    """Three columns for two ranks are one and two. Flat ranges have any sizes, and may be empty."""
    whole = np.arange(15).reshape(5, 3)
    assert [part.tolist() for part in cut_views(whole, 2, 1, 1)] == [whole[:, :1].tolist(), whole[:, 1:].tolist()]
    assert sum(len(part) for part in cut_views(whole, 2, 0, 1)) == 5 and all(part.base is whole.base for part in cut_views(whole, 2, 0, 1))
    assert [part.tolist() for part in cut_views(whole, 3, 0, 1, (0, 1, 1, 15))] == [[0], [], [*range(1, 15)]]
    with pytest.raises(ProgramError, match=r"bounds \[0, 15\] give 1 ranges; the group has 2 ranks"):
        cut_views(whole, 2, 0, 1, (0, 15))


def test_parts_of_rows_are_flat_ranges_and_those_of_columns_are_boxes():
    t = TensorType("float32", (4, 6))
    assert list(flat_marks(t, 2, 0, 1, Offsets())) == [0, 12, 24] and flat_marks(t, 2, 1, 1, Offsets()) is None
    assert boxes(t, 3, {"axis": 1, "unit": 1, "bounds": Offsets()}) == [(4, 2)] * 3
    assert boxes(t, 3, {"axis": 0, "unit": 1, "bounds": Offsets()}) is None
    assert list(owned_by(2, 3, 24)) == [0, 0, 0, 24]


@pytest.mark.parametrize("name, attrs, old, new", [
    ("all_reduce", {}, SUM, None), ("reduce", {"root": 1}, SUM, ROOT), ("reduce_scatter", {}, SUM, ROWS),
    ("reduce_scatter", {"axis": 1}, SUM, COLUMNS), ("reduce_scatter", {"bounds": (0, 4, 12)}, SUM, HALVES),
    ("all_reduce", {"op": "max"}, Partial("max", "dp"), None),
    ("broadcast", {"root": 1}, ROOT, None), ("broadcast", {"root": 1}, None, None),
    ("all_gather", {}, ROWS, None), ("all_gather", {"axis": 1}, COLUMNS, None), ("all_gather", {"bounds": (0, 4, 12)}, HALVES, None),
    ("all_to_all", {"to_axis": 1}, ROWS, COLUMNS),
    ("scatter_parts", {"root": 1}, ROOT, ROWS), ("gather_parts", {"root": 1}, ROWS, ROOT),
    ("part", {}, None, ROWS), ("pad_part", {}, ROWS, SUM), ("own_term", {"root": 1}, ROOT, SUM),
    ("transfer", {"root": 1, "to": 0}, ROOT, At(0, "dp")),
])  # fmt: skip
def test_from_which_placement_to_which_an_operator_goes(name, attrs, old, new):
    definition = opdef(name)
    full = definition.complete_attrs({"group": "dp", **attrs})
    assert definition.comm.move(old, **full) == new
    with pytest.raises(ProgramError, match=rf"^op {name} takes .*, not shard\(3\) over dp$"):
        definition.comm.move(Shard(3, "dp"), **full)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["avg", "prod"])
def test_no_placement_stands_for_partial_means_and_products(name, op):
    definition = opdef(name)
    full = definition.complete_attrs({"group": "dp", "op": op, **({"root": 0} if name == "reduce" else {})})
    with pytest.raises(ProgramError, match=f"{name} of op {op} is no redistribution"):
        definition.comm.move(SUM, **full)


@pytest.mark.parametrize("name", ["reduce", "broadcast", "scatter_parts", "gather_parts"])
def test_a_root_is_an_index_into_the_group(name):
    definition = opdef(name)
    with pytest.raises(ProgramError, match=f"op {name}: root must be an index into group dp, from 0 on, got -1"):
        definition.infer(TensorType("float32", (4,)), **definition.complete_attrs({"group": "dp", "root": -1}))
