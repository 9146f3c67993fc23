"""Where values lie, by text: cuts spread from the batch, sums wait for a reader that needs the whole, and every move has a reason."""

import pytest

import fluidx as fx
from fluidx.testing import check_pass
from fluidx.transpiler.passes.place import Place
from fluidx.transpiler.placement.parameter_homes import AtRoots, Everywhere, InPieces, Sharded

GIVEN = "group dp = [0, 1]; data %x: f32[-1,2]; param %w: f32[2,4]; var %lr: f32[1] persistable"
SPLIT = "data %x: f32[-1,2] shard(0) over dp"
BEFORE = """
  %y: f32[-1,4] = matmul(%x, %w)
loss:
  %loss: f32[1] = mean(%y)
backward:
  %one: f32[1] stop_gradient = fill_constant() {shape=[1], value=1.0}
  %y@GRAD: f32[-1,4] stop_gradient = reduce_mean_grad(%y, %one)
  %w@GRAD: f32[2,4] stop_gradient = matmul(%x, %y@GRAD) {transpose_x=true} for %w, %w@GRAD
optimize:
  %w = sgd(%w, %w@GRAD, %lr)
"""
FORWARD = """
  %y: f32[-1,4] shard(0) over dp = matmul(%x, %w)
loss:
  %loss: f32[1] partial(sum) over dp = mean(%y)
backward:
  %one: f32[1] stop_gradient = fill_constant() {shape=[1], value=1.0}
  %y@GRAD: f32[-1,4] shard(0) over dp stop_gradient = reduce_mean_grad(%y, %one)
  %w@GRAD: f32[2,4] partial(sum) over dp stop_gradient = matmul(%x, %y@GRAD) {transpose_x=true} for %w, %w@GRAD
dist:
"""


def placed(update, after):
    head = "\n".join(["  " + SPLIT, after.partition(FORWARD)[0]])
    return check_pass(
        Place(update), given=GIVEN, before="forward:" + BEFORE, after=head + "\nforward:" + FORWARD + after.partition(FORWARD)[2]
    )


def test_updated_everywhere_a_gradient_is_made_whole():
    placed(
        Everywhere(),
        FORWARD
        + """
  %w@GRAD.sum: f32[2,4] stop_gradient = redistribute(%w@GRAD) {reason="update"}
optimize:
  %w = sgd(%w, %w@GRAD.sum, %lr)
""",
    )


def test_at_a_root_the_parameter_is_there_and_its_new_value_goes_home():
    placed(
        AtRoots(),
        FORWARD
        + """
  %w@GRAD.sum: f32[2,4] at(0) over dp stop_gradient = redistribute(%w@GRAD) {reason="update"}
optimize:
  %w.new: f32[2,4] at(0) over dp stop_gradient = sgd(%w, %w@GRAD.sum, %lr)
dist:
  %w = redistribute(%w.new) {reason="its storage placement"}
""",
    )


def test_in_pieces_every_operand_of_the_update_is_the_same_range():
    placed(
        InPieces(16 / 2**20),
        FORWARD
        + """
  %w@GRAD.sum: f32[2,4] pieces(0, 4, 8) over dp stop_gradient = redistribute(%w@GRAD) {reason="update"}
  %w.part: f32[2,4] pieces(0, 4, 8) over dp stop_gradient = redistribute(%w) {reason="sgd: flat ranges"}
optimize:
  %w.new: f32[2,4] pieces(0, 4, 8) over dp stop_gradient = sgd(%w.part, %w@GRAD.sum, %lr)
dist:
  %w = redistribute(%w.new) {reason="its storage placement"}
""",
    )


def test_sharded_the_update_works_on_a_slice():
    placed(
        Sharded(),
        FORWARD
        + """
  %w@GRAD.sum: f32[2,4] shard(0) over dp stop_gradient = redistribute(%w@GRAD) {reason="update"}
  %w.part: f32[2,4] shard(0) over dp stop_gradient = redistribute(%w) {reason="sgd: cut *0"}
optimize:
  %w.new: f32[2,4] shard(0) over dp stop_gradient = sgd(%w.part, %w@GRAD.sum, %lr)
dist:
  %w = redistribute(%w.new) {reason="its storage placement"}
""",
    )


def test_what_needs_the_whole_batch_gets_it_with_a_reason():
    job = check_pass(Place(), given=GIVEN, before="%s: f32[-1,2] = cumsum(%x) {axis=0}", after="\n".join([
        SPLIT, "dist:", '%x.full: f32[-1,2] stop_gradient = redistribute(%x) {reason="cumsum: whole"}', "forward:",
        "%s: f32[-1,2] = cumsum(%x.full) {axis=0}",
    ]))  # fmt: skip
    assert [str(m) for m in job.log] == ["%x: shard(0) over dp to replicate, 8192 bytes, for cumsum: whole"]


def test_strict_refuses_what_the_strategy_did_not_ask_for():
    with pytest.raises(
        fx.TranspileError, match=r"strict: a redistribute would be needed: %x: shard\(0\) over dp to replicate, .* for cumsum: whole"
    ):
        check_pass(Place(strict=True), given=GIVEN, before="%s: f32[-1,2] = cumsum(%x) {axis=0}", after="")


def test_a_running_sum_stays_one_until_a_reader_is_not_linear():
    check_pass(Place(), given=GIVEN, before="""
  %a: f32[2] = reduce_sum(%x) {dim=[0]}
  %b: f32[2] = scale(%a) {scale=3.0}
  %c: f32[2] = square(%b)
""", after=f"""
  {SPLIT}
forward:
  %a: f32[2] partial(sum) over dp = reduce_sum(%x) {{dim=[0]}}
  %b: f32[2] partial(sum) over dp = scale(%a) {{scale=3.0}}
dist:
  %b.sum: f32[2] stop_gradient = redistribute(%b) {{reason="square: whole"}}
forward:
  %c: f32[2] = square(%b.sum)
""")  # fmt: skip


def test_an_annotation_over_an_axis_that_the_ranks_lack_is_refused():
    with pytest.raises(fx.TranspileError, match="'w' is annotated shard.1. over tp, but the ranks have no axis 'tp'"):
        check_pass(Place(), given=GIVEN.replace("f32[2,4]", "f32[2,4] shard(1) over tp"), before="%y: f32[-1,4] = matmul(%x, %w)", after="")


def test_a_softmax_over_a_cut_axis_is_written_out_so_that_only_its_reductions_are_sent():
    job = check_pass(Place(), given=GIVEN, before="%s: f32[-1,2] = softmax(%x) {axis=0}", after=f"""
  {SPLIT}
forward:
  %s.largest: f32[1,2] partial(max) over dp stop_gradient = reduce_max(%x) {{dim=[0], keep_dim=true}}
dist:
  %s.largest.max: f32[1,2] stop_gradient = redistribute(%s.largest) {{reason="elementwise_sub: cut *0"}}
forward:
  %s.shifted: f32[-1,2] shard(0) over dp stop_gradient = elementwise_sub(%x, %s.largest.max)
  %s.exp: f32[-1,2] shard(0) over dp stop_gradient = exp(%s.shifted)
  %s.total: f32[1,2] partial(sum) over dp stop_gradient = reduce_sum(%s.exp) {{dim=[0], keep_dim=true}}
dist:
  %s.total.sum: f32[1,2] stop_gradient = redistribute(%s.total) {{reason="elementwise_div: cut *0"}}
forward:
  %s: f32[-1,2] shard(0) over dp = elementwise_div(%s.exp, %s.total.sum)
""")  # fmt: skip
    assert [move.nbytes for move in job.log] == [8, 8]


def test_terms_are_not_carried_on_where_more_of_them_would_have_to_be_reduced():
    check_pass(Place(), given=GIVEN, before="""
  %a: f32[2] = reduce_sum(%x) {dim=[0]}
  %b: f32[2,4] = elementwise_mul(%w, %a) {axis=0}
""", after=f"""
  {SPLIT}
forward:
  %a: f32[2] partial(sum) over dp = reduce_sum(%x) {{dim=[0]}}
dist:
  %a.sum: f32[2] stop_gradient = redistribute(%a) {{reason="elementwise_mul: whole"}}
forward:
  %b: f32[2,4] = elementwise_mul(%w, %a.sum) {{axis=0}}
""")  # fmt: skip
