"""Programs of ranks as ONNX models, to be looked at."""

import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import helper  # noqa: E402

from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing import models  # noqa: E402

COMMUNICATION = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "reduce"}
STRATEGIES = {
    "data_parallel": fx.strategies.data_parallel,
    "ring_optimizer": fx.strategies.ring_optimizer,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "zero2": fx.strategies.zero2,
    "fsdp": fx.strategies.fsdp,
}


def transpiled(strategy, kind="batch_norm"):
    m = models.classifier(kind=kind)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=m.main, startup_program=m.startup, trainers=2)
    return t, m


def said(model):
    return {p.key: p.value for p in model.metadata_props}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_program_of_a_rank_is_written_whole_with_its_communication(name):
    t, m = transpiled(STRATEGIES[name]())
    for program in (t.get_trainer_program(1), t.get_startup_program(1)):
        model = to_onnx(program)
        onnx.checker.check_model(model, full_check=True)
        own = [n for n in model.graph.node if n.domain == "ai.fluidx"]
        told = [op for op in program.ops if op.type in COMMUNICATION]
        assert told and [n.op_type for n in own if n.op_type in COMMUNICATION] == [op.type for op in told]
        for node, op in zip([n for n in own if n.op_type in COMMUNICATION], told, strict=True):
            found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            for key in {"group", "op", "root", "peer"} & op.attrs.keys():
                assert (found[key].decode() if isinstance(found[key], bytes) else found[key]) == op.attrs[key]
        assert not model.graph.initializer
        parsed = fx.Program.parse_from_string(said(model)["fluidx.program"])
        assert parsed == program and str(parsed) == str(program)


def test_metadata_says_which_rank_of_what_it_is():
    t, m = transpiled(fx.strategies.ring_optimizer())
    found = said(to_onnx(t.get_trainer_program(1), fetches=[m.loss]))
    assert (found["fluidx.rank"], found["fluidx.world_size"], found["fluidx.groups"]) == ("1", "2", "dp = ((0, 1),)")
    assert found["fluidx.strategy"].startswith("ring_optimizer(")


def test_what_lasts_goes_in_and_comes_out_and_shapes_are_those_of_the_rank():
    t, m = transpiled(fx.strategies.fsdp())
    program = t.get_trainer_program(0)
    graph = to_onnx(program, fetches=[m.loss]).graph
    lasting = [v for v in program.list_vars() if v.persistable]
    inputs = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
    assert {v.name for v in lasting} < inputs.keys()
    for v in lasting:
        assert inputs[v.name] == list(v.shape)
    moved = {n for op in program.ops for n in op.output_arg_names} & {v.name for v in lasting}
    assert len(graph.output) == len(moved) + 1


def test_what_a_rank_program_is_not_written_with_is_refused():
    t, m = transpiled(fx.strategies.data_parallel())
    with pytest.raises(fx.onnx.OnnxError, match="is exported whole; give loss with the program that it was made from"):
        to_onnx(t.get_trainer_program(0), loss=m.loss)
    with pytest.raises(fx.ProgramError, match="has no variable 'lost'"):
        to_onnx(t.get_trainer_program(0), fetches=["lost"])


def test_load_says_what_such_a_file_is_for(tmp_path):
    t, _ = transpiled(fx.strategies.data_parallel())
    fx.onnx.save(t.get_trainer_program(1), tmp_path / "rank1.onnx")
    with pytest.raises(
        fx.onnx.OnnxError, match=r"program of rank 1 of 2, exported to look at, without weights; fx.Program.parse_from_string"
    ):
        fx.onnx.load(tmp_path / "rank1.onnx")
