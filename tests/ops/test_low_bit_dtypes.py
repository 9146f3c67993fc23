"""Dtypes without arithmetic, of 8 bits and fewer: they can be moved, cast, fed, fetched and saved, and every other op refuses them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fluidx as fx
from fluidx.files.safetensors import CheckpointError
from fluidx.ir import Builder, FeedError, ProgramError
from fluidx.ir.dtypes import SHORT, TINY, np_dtype
from fluidx.ir.opdef import OPS

pytest.importorskip("ml_dtypes")


@pytest.fixture
def b():
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        yield Builder(main.global_block())


def run(b, feed, *fetch):
    return fx.Executor(fx.CPUPlace()).run(b.block.program, feed=feed, fetch_list=[*fetch])


def cast(b, values, dtype, of="float32", **attrs):
    x = fx.data(of, ["n"], of)
    return run(b, {of: np.asarray(values, np_dtype(of))}, b.cast(x, dtype=dtype, **attrs))[0]


def test_ml_dtypes_is_imported_only_when_used():
    said = "import sys, fluidx; assert 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)


@pytest.mark.parametrize("dtype", TINY)
def test_they_stand_in_program_texts(b, dtype):
    x = fx.data("x", ["n", 4], dtype)
    assert str(x) == f"<Variable x: {SHORT[dtype]}[n,4]>" and fx.data("y", [1], SHORT[dtype]).dtype == dtype
    program = b.block.program
    assert str(fx.Program.parse_from_string(str(program))) == str(program)


# -- moves ----------------------------------------------------------------------------------------------------------------------


def moved(definition, sample, dtype):
    """The result of an operator for a sample whose floats are replaced by codes, counted up, of a dtype."""
    program = fx.Program("p")
    block, feed, args = program.global_block(), {}, {}
    for slot, given in zip(definition.in_slots, sample.args, strict=True):
        named = args[slot.name] = []
        for value in given if slot.many else () if given is None else (given,):
            codes = (np.arange(value.size) % 2 + 1).astype(np.uint8).reshape(value.shape)
            value = value if value.dtype.kind != "f" else codes.view(np_dtype(dtype)) if dtype != "int4" else codes.astype(np_dtype(dtype))
            named.append(f"{slot.name}{len(named)}")
            feed[named[-1]] = value
            block.create_var(named[-1], value.shape, value.dtype.name, is_data=True)
    many = len(definition.typed(*definition.arrange(args, value=lambda n: block.desc(n).type), **definition.complete_attrs(sample.attrs))) \
        if definition.out_slots[0].many else 1  # fmt: skip
    block.append_op(definition.name, args, {definition.out_slots[0].name: [f"out{k}" for k in range(many)]}, sample.attrs)
    return fx.Executor(fx.CPUPlace()).run(program, feed=feed, fetch_list=[f"out{k}" for k in range(many)])


@pytest.mark.parametrize("name", sorted(n for n, d in OPS.items() if d.autocast.takes_low_bit and n != "cast"))
def test_operators_that_move_elements_accept_them(name):
    definition = OPS[name]
    for sample in definition.samples():
        if len(definition.out_slots) > 1 or sample.attrs.get("pad_value"):  # 1.0 is another code in each dtype
            continue
        want = moved(definition, sample, "uint8")
        for dtype in ("float8_e4m3fn", "int4"):
            found = moved(definition, sample, dtype)
            for a, w in zip(found, want, strict=True):
                assert a.shape == w.shape and (np.ascontiguousarray(a).view(w.dtype if a.dtype.itemsize > 1 else np.uint8) == w).all()


@pytest.mark.parametrize("name", ["relu", "reduce_sum", "softmax", "scale"])
def test_operators_that_compute_refuse_them(b, name):
    with pytest.raises(ProgramError, match=f"op {name} does not compute in int4, found i4\\[n,4\\]; cast it to float32 or int32 first"):
        getattr(b, name)(fx.data("x", ["n", 4], "int4"))


# -- casts, by the tables of ONNX's Cast -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TINY)
def test_casts_to_float_and_back_keep_every_code(b, dtype):
    codes = np.arange(256, dtype=np.uint8)
    kind = np_dtype(dtype)
    values = codes.view(kind) if dtype.startswith("float8") else np.unique(codes.astype(np.float32)[:16] - 8).astype(kind)
    x = fx.data("x", ["n"], dtype)
    wide = b.cast(x, dtype="float32")
    got, back = run(b, {"x": values}, wide, b.cast(wide, dtype=dtype))
    known = np.isfinite(got)  # infinity saturates
    assert known.sum() > 3 and back.dtype == kind and (back.astype(np.float32)[known] == got[known]).all()


@pytest.mark.parametrize(
    ("dtype", "largest", "beyond"),
    [("float8_e4m3fn", 448, np.nan), ("float8_e5m2", 57344, np.inf), ("float8_e4m3fnuz", 240, np.nan), ("float8_e5m2fnuz", 57344, np.nan)],
)
def test_numbers_out_of_range_saturate_if_asked(b, dtype, largest, beyond):
    assert cast(b, [1e6, -1e6, 1.0], dtype).astype(np.float32).tolist() == [largest, -largest, 1]
    np.testing.assert_array_equal(cast(b, [1e6], dtype, saturate=False).astype(np.float32), np.float32([beyond]))


@pytest.mark.parametrize(("mode", "want"), [("up", [1, 2, 4, 8]), ("down", [1, 2, 2, 4]), ("nearest", [1, 2, 4, 4])])
def test_powers_of_two_follow_the_round_mode(b, mode, want):
    assert cast(b, [1, 2, 3, 5], "float8_e8m0fnu", round_mode=mode).astype(np.float32).tolist() == want


def test_short_integers_keep_the_lowest_bits(b):
    assert cast(b, [17, -1, 8], "int4", of="int32").astype(int).tolist() == [1, -1, -8]
    assert cast(b, [5, -1], "uint2", of="int64").astype(int).tolist() == [1, 3]


def test_an_unknown_round_mode_is_refused(b):
    with pytest.raises(ProgramError, match="round_mode must be up, down or nearest, found 'odd'"):
        b.cast(fx.data("x", [1]), dtype="float8_e8m0fnu", round_mode="odd")


# -- feeds and files --------------------------------------------------------------------------------------------------------------


def test_feeds_have_the_dtype(b):
    x = fx.data("x", [2], "float8_e5m2")
    said = r"'x' is declared f8e5m2\[2\], the feed has dtype float32; feed np.asarray\(x, ml_dtypes.float8_e5m2\), or feed floats and cast"
    with pytest.raises(FeedError, match=said):
        run(b, {"x": np.float32([1, 2])}, x)


def test_files_store_the_dtypes_of_their_format(tmp_path):
    from fluidx.files.safetensors import ArrayFile, save_arrays

    path = str(tmp_path / "a.safetensors")
    held = {d: np.arange(6, dtype=np.uint8).reshape(2, 3).view(np_dtype(d)) for d in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")}
    save_arrays(path, held, {})
    with ArrayFile(path) as f:
        for name, array in held.items():
            assert f.type_of(name) == (name, (2, 3)) and f.array(name).tobytes() == array.tobytes()
    with pytest.raises(CheckpointError, match="variable 'w' is int4; the format has bool, int8.*: cast it to one of them"):
        save_arrays(path, {"w": np.zeros(2, np_dtype("int4"))}, {})
