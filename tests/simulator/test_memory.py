"""What the system shows of a rank: of other ranks' arrays that it touches in shared memory, each place once, worked by hand."""

import pytest

import fluidx as fx
from fluidx import Program, native
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware import Device, Figure, Hardware, LinkFigures
from fluidx.native import shared
from fluidx.simulator.calibration.context import context_bytes
from fluidx.simulator.memory import rank_memory


def machine(kind="cpu"):
    one = Figure(1.0, "an example")
    device = Device("toy", kind, one, {"float32": one}, one, one, one, one, one, Figure(1e6, "an example"))
    return Hardware("toy", "an example", 8, 1, device, LinkFigures(one, one), None, one)


def read(lines, rank=0, n=4, declared=("var %x: f32[4000] persistable", "var %y: f32[4000] persistable"), kind="cpu"):
    """The bytes that a rank of n touches; a variable has 16,000."""
    text = [f"program some {{\n  rank {rank}\n  group g = {list(range(n))}", *(f"  {line}" for line in declared), "forward:", *lines, "}"]
    return rank_memory(dry_plan(Program.parse_from_string("\n".join(text))), machine(kind)).read


def test_an_all_reduce_touches_its_part_of_all_terms_and_results():
    # a quarter of the terms and of the results of three others; if they are one variable, once
    assert read(['%y = all_reduce(%x) {group="g"}']) == 3 * 2 * 4000
    assert read(['%x = all_reduce(%x) {group="g"}']) == 3 * 4000
    assert read(['%x = all_reduce(%x) {group="g"}'], n=1) == read(['%x = all_reduce(%x) {group="g"}'], kind="gpu") == 0


@pytest.mark.parametrize("rank", range(4))
def test_a_reduce_scatter_reads_its_part_and_an_all_gather_the_parts_of_others(rank):
    part = ("var %x: f32[4000] persistable", "var %p: f32[4000] shard(0) over g persistable")
    assert read(['%p = reduce_scatter(%x) {group="g"}'], rank, declared=part) == 3 * 4000
    assert read(['%x = all_gather(%p) {group="g"}'], rank, declared=part) == 3 * 4000
    assert read(['%p = reduce_scatter(%x) {group="g"}', '%x = all_gather(%p) {group="g"}'], rank, declared=part) == 3 * 8000


def test_what_is_read_again_counts_once():
    assert read(['%x = all_reduce(%x) {group="g"}'] * 3) == 3 * 4000


def test_a_receiver_reads_the_array_of_the_sender_unless_that_is_copied():
    large = ("var %x: f32[40000] persistable",)
    assert read(['%x = recv() {group="g", peer=1, shape=[40000]}'], declared=large) == 160_000
    assert read(['send(%x) {group="g", peer=1}'], declared=large) == 0
    assert read(['%x = recv() {group="g", peer=1, shape=[4000]}']) == 0  # 16,000 bytes are copied by the sender


def test_what_fsdp_keeps_of_a_program_falls_with_the_number_of_devices():
    """Adam in mixed precision: 4 bytes of a parameter and 8 of its moments, a part of them on each device; the arena stays, with the same
    rows on a device, but for the parts of gradients."""
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, 512], "float32")
        for _ in range(8):
            h = fx.layers.fc(h, 512, act="relu", bias_attr=False)
        fx.mixed_precision.decorate(fx.optimizer.Adam(0.1), dtype="float16", reduce_dtype="float32").minimize(fx.layers.mean(h))
    parameters, plans = 8 * 512 * 512, {}
    for n in (8, 16, 64):
        t = fx.DistributeTranspiler("fsdp").transpile(program=main, startup_program=startup, trainers=n)
        plans[n] = fx.simulate(t, cluster="dgx-h100", batch=64 * n, verify=False, exact=0).plans[0]
    for n in (16, 64):
        assert plans[8].nbytes("state") - plans[n].nbytes("state") == pytest.approx(12 * parameters * (1 / 8 - 1 / n), rel=1e-3)
        assert 0 <= plans[8].arena_bytes - plans[n].arena_bytes <= 4 * parameters * (1 / 8 - 1 / n) * 1.1
    assert len({p.nbytes("feed") for p in plans.values()}) == 1


@pytest.mark.skipif(bool(reason := native.why_not() or shared.why_not()), reason=reason)
def test_a_process_without_arrays_takes_some_ten_megabytes():
    assert 5e6 < context_bytes(0.0) < 500e6
