"""A rank reads no state that its startup did not write: not where its part is empty, and not what main alone declares."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import parse_pair
from tests.verify.programs import DATA_PARALLEL, MODEL, edited, prove, ranks_of

CUT = 'group="dp", axis=0'
PARTS = ranks_of(  # four rows over five ranks: rank 0 has none
    5,
    f"""dist:
  %w@GRAD.sum: f32[4,3] shard(0) over dp = reduce_scatter(%w@GRAD) {{{CUT}, op="sum"}}
  %w.part: f32[4,3] shard(0) over dp = part(%w) {{{CUT}}}
optimize:
  %w.new: f32[4,3] shard(0) over dp, %m = momentum(%w.part, %w@GRAD.sum, %m, %lr) {{mu=0.9}}
dist:
  %w = all_gather(%w.new) {{{CUT}}}
""",
    m=" shard(0) over dp",
)
OTHER = edited(PARTS, "  var %m:", "  var %other: f32[4,3] shard(0) over dp persistable\n  var %m:")
UPDATE = "momentum(%w.part, %w@GRAD.sum, %m, %lr)"


def run(texts):
    with fx.ParallelExecutor([parse_pair(t) for t in texts], places=fx.cpu_places(len(texts)), timeout=5, verify=False) as exe:
        exe.run_startup()
        exe.run(feed={"x": np.ones((6, 4), "float32")})


def test_a_state_that_main_alone_declares_is_found_where_the_part_is_empty():
    prove(MODEL, PARTS)
    wrong = edited(OTHER, UPDATE, UPDATE.replace("%m", "%other"), [0])
    with pytest.raises(fx.VerifyError, match="rank 0.*%other.*startup"):
        prove(MODEL, wrong)
    with pytest.raises(fx.FluidxError, match="other"):  # the run dies of it too
        run(wrong)


def test_a_state_of_the_source_is_found_where_the_startup_of_a_rank_leaves_its_empty_part_out():
    init = "  %m = fill_constant() {shape=[4,3], value=0.0}\n"
    with pytest.raises(fx.VerifyError, match="rank 0.*%m"):
        prove(MODEL, edited(PARTS, init, "", [0]))


@pytest.mark.parametrize("ranks", [[0], [1], None], ids=["rank 0", "rank 1", "all"])
def test_a_state_that_nobody_has_is_found_where_its_numbers_do_not_count(ranks):
    texts = edited(DATA_PARALLEL, "  param %w: f32[4,3]\n", "  param %w: f32[4,3]\n  var %other: f32[4,3] persistable\n")
    texts = edited(texts, "loss:\n", "  %other.copy: f32[4,3] = print(%other)\nloss:\n", ranks)
    with pytest.raises(fx.VerifyError, match="%other.*startup"):
        prove(MODEL, texts)


def test_a_state_that_startup_writes_may_be_read():
    texts = edited(OTHER, "startup:\n", "startup:\n  %other = fill_constant() {shape=[4,3], value=0.0}\n")
    texts = edited(texts, UPDATE, UPDATE.replace("%m", "%other"), [0])
    prove(MODEL, texts)
    run(texts)


def test_the_report_names_what_is_to_be_loaded():
    source = MODEL.replace("  %lr = fill_constant() {shape=[1], value=0.1}\n", "")
    texts = edited(DATA_PARALLEL, "  %lr = fill_constant() {shape=[1], value=0.1}\n", "")
    report = prove(source, texts)
    assert report.loaded == ["lr"]
    assert "  to load      %lr: no startup program writes it, also on one device; load a value before the first step" in str(report)
    assert "to load" not in str(prove(MODEL, DATA_PARALLEL))
