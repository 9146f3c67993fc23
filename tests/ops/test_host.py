"""The print op shows values, in as many runs as asked, with the rank in each line."""

from types import SimpleNamespace

import numpy as np

from fluidx.ops import host  # noqa: F401

X = np.arange(6, dtype="float32").reshape(2, 3)


def context(step=0, rank=0, world_size=1):
    return SimpleNamespace(step=step, rank=rank, world_size=world_size)


def test_a_printed_line_has_the_name_and_the_value(run_op, capsys):
    assert run_op("print", X, message="hidden:", tensor_name="fc_0.tmp_0", summarize=3).tolist() == X.tolist()
    assert capsys.readouterr().out == "hidden: fc_0.tmp_0 f32[2,3] [0.0, 1.0, 2.0, ...]\n"


def test_parts_of_the_line_can_be_left_out(run_op, capsys):
    run_op("print", X[:1], print_tensor_type=False, summarize=-1)
    run_op("print", X[:1], print_tensor_shape=False)
    run_op("print", X[:1], print_tensor_type=False, print_tensor_shape=False, tensor_name="x", print_tensor_name=False)
    assert capsys.readouterr().out.splitlines() == ["[1,3] [0.0, 1.0, 2.0]", "f32 [0.0, 1.0, 2.0]", "[0.0, 1.0, 2.0]"]


def test_only_the_first_runs_print(run_op, capsys):
    for step in range(4):
        run_op("print", X, first_n=2, summarize=1, ctx=context(step))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_each_line_has_the_rank(run_op, capsys):
    run_op("print", X[1:], summarize=1, ctx=context(rank=1, world_size=2))
    assert capsys.readouterr().out == "[rank 1] f32[1,3] [3.0, ...]\n"
