"""An operator whose placements no rule allows is refused with the next step."""

import pytest

from fluidx.ir import Program, VerifyError
from fluidx.verify import check_program

TEXT = """program p {{
  group dp = [0, 1]
  data %rows: f32[-1,4] shard(0) over dp
  data %all: f32[-1,4]
  data %terms: f32[-1,4] partial(sum) over dp
  param %w: f32[4,3] shard(1) over dp
forward:
  {op}
}}"""


def refused(op):
    with pytest.raises(VerifyError) as e:
        check_program(Program.parse_from_string(TEXT.format(op=op)))
    return str(e.value).splitlines()[0].partition(": no rule allows its placements: ")[2]


@pytest.mark.parametrize(
    "op, step",
    [
        ("%y: f32[-1,4] = assign(%terms)", "all_reduce X over dp (each rank holds only a partial sum) first"),
        ("%y: f32[-1,4] shard(0) over dp = relu(%terms)", "redistribute X to shard(0) over dp first"),
        ("%y: f32[-1,3] shard(0) over dp = matmul(%rows, %w)", "all_gather Y over dp first"),
        ("%y: f32[-1,3] shard(0) over dp = matmul(%all, %w)", "redistribute X to shard(0) over dp and all_gather Y over dp first"),
        ("%y: f32[-1,4] at(1) over dp = elementwise_add(%rows, %all)", "redistribute X to at(1) over dp first"),
        ("%y: f32[-1,4] shard(0) over dp = sum([%rows, %all, %rows])", "redistribute X[1] to shard(0) over dp first"),
    ],
)
def test_the_operands_to_redistribute_are_named(op, step):
    assert refused(op).partition("; ")[2] == step


def test_a_result_that_the_operands_cannot_give_is_named_with_the_one_that_they_give():
    assert refused("%y: f32[-1,4] shard(1) over dp = softmax(%rows)") == (
        "X shard(0) over dp cannot give Out shard(1) over dp; the result is shard(0) over dp: declare that, and redistribute the result"
    )
    assert refused("%y: f32[-1,4] partial(sum) over dp = relu(%terms)").partition("; ")[2] == (
        "all_reduce X over dp (each rank holds only a partial sum) first; then the result is whole over dp"
    )
