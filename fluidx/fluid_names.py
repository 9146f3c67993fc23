"""Names of fluid 1.8 that fluidx does not have, with a hint what to write instead. Modules look up a missing name in this table before they
suggest a similar one. docs/migration.md shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from .ir.errors import nearest

_RNN = "sequences are padded: write layers.rnn(cell, x, sequence_length=lengths) with a cell of your own, a class of RNNCell"
_LOD = "there are no LoD tensors: sequences are padded to one length, with their lengths beside them"
_BEAM = "there is no beam search: decode step by step with layers.while_loop and layers.topk"
_DETECTION = "layers for detection are not here, but for multiclass_nms, roi_align and roi_pool; write it with layers.*"
_DYGRAPH = "programs are static graphs: write layers under program_guard, and run them with Executor"
_CRF = (
    "there is no CRF: train each tag with layers.softmax_with_cross_entropy; the sum over tag paths is a recurrence for layers.rnn with a "
    "cell of your own"
)
_SAMPLED = "classes are not sampled: write layers.softmax_with_cross_entropy over all of them"
_THREE = "there are no layers for volumes; fold one axis into the batch, or import the model from ONNX, whose Conv and pools take volumes"
_DATASET = "read the files in a generator: io.DataLoader.from_generator(feed_list=...).set_sample_generator(...)"
_COUNTED = "compare fetched values in Python; metrics.{} keeps the counts over batches"
_ROWS = "gradients are dense; there are no SelectedRows"

# {module: {names, separated by spaces: what is written instead}}
NOT_HERE: dict[str, dict[str, str]] = {
    "": {
        "dygraph enable_dygraph disable_dygraph enable_imperative disable_imperative VarBase": _DYGRAPH,
        "LoDTensor LoDTensorArray Tensor create_lod_tensor create_random_int_lodtensor ComplexVariable": _LOD + "; feed NumPy arrays",
        "DatasetFactory InMemoryDataset QueueDataset dataset DataFeedDesc": _DATASET,
        "TrainerDesc MultiTrainer DistMultiTrainer PipelineTrainer trainer_desc trainer_factory device_worker": _DATASET,
        "learning_rate_decay": "write layers.noam_decay and its kin, or lr_scheduler",
        "evaluator": "write metrics, whose classes take fetched values",
        "load_op_library": "declare an operator in Python: a class of fluidx.ir.OpDef (CONTRIBUTING.md)",
        "distributed communicator": "write DistributeTranspiler, or incubate.fleet.collective",
        "debugger net_drawer graphviz": "fluidx.view.html(program, 'page.html') writes a page, fluidx.view.draw(program) is an SVG",
        "default_scope_funcs op": "it is of fluid's own inside; nothing takes its place",
    },
    "layers": {
        "dynamic_lstm": "sequences are padded: write layers.rnn(LSTMCell(size), x, sequence_length=lengths)",
        "dynamic_gru": "sequences are padded: write layers.rnn(GRUCell(size), x, sequence_length=lengths)",
        "dynamic_lstmp DynamicRNN": _RNN,
        "sequence_pool": "sequences are padded: write layers.reduce_sum(x * mask, dim=1) or layers.reduce_max(x, dim=1), with "
        "mask = layers.unsqueeze(layers.sequence_mask(lengths, maxlen, 'float32'), [2])",
        "sequence_first_step": "sequences are padded: write x[:, 0]",
        "sequence_last_step": "sequences are padded: layers.rnn gives the last states, or write layers.gather_nd at lengths - 1",
        "sequence_softmax": "sequences are padded: write layers.softmax(scores + (mask - 1.0) * 1e9)",
        "sequence_conv": "sequences are padded: write layers.conv2d over [batch, 1, time, width]",
        "sequence_expand sequence_expand_as": "sequences are padded: write layers.expand(layers.unsqueeze(x, [1]), [1, maxlen, 1])",
        "sequence_pad sequence_unpad": "sequences are padded already, in the reader; layers.sequence_mask says which steps count",
        "sequence_concat sequence_slice sequence_reshape sequence_scatter sequence_enumerate sequence_reverse lod_reset lod_append "
        "reorder_lod_tensor_by_rank im2sequence row_conv filter_by_instag": _LOD,
        "Decoder BeamSearchDecoder dynamic_decode DecodeHelper TrainingHelper GreedyEmbeddingHelper SampleEmbeddingHelper BasicDecoder "
        "beam_search beam_search_decode gather_tree": _BEAM,
        "linear_chain_crf crf_decoding": _CRF,
        "chunk_eval": _COUNTED.format("ChunkEvaluator"),
        "edit_distance ctc_greedy_decoder": _COUNTED.format("EditDistance"),
        "warpctc": "there is no CTC loss; ONNX models have none either",
        "nce hsigmoid sampled_softmax_with_cross_entropy": _SAMPLED,
        "rank_loss": "write layers.softplus(left - right) - label * (left - right)",
        "bpr_loss center_loss npair_loss teacher_student_sigmoid_loss": "write the formula with layers.*",
        "conv3d conv3d_transpose pool3d adaptive_pool3d": _THREE,
        "inplace_abn": "write layers.batch_norm(x, act=...); storage is planned",
        "data_norm": "write layers.batch_norm",
        "spectral_norm": "write the power iteration with layers.matmul and layers.l2_normalize",
        "affine_channel": "write layers.elementwise_add(layers.elementwise_mul(x, scale, axis=1), bias, axis=1)",
        "bilinear_tensor_product": "write layers.einsum('bi,kij,bj->bk', x, w, y)",
        "multiplex": "write layers.gather_nd over layers.stack of the inputs, or layers.where",
        "crop crop_tensor": "write layers.slice(x, axes, starts, ends)",
        "pad_constant_like": "write layers.pad",
        "mean_iou": "compare fetched values in Python",
        "space_to_depth": "write layers.reshape, layers.transpose and layers.reshape",
        "shard_index": "write layers.where over id // shard_size; layers.embedding is cut by ParamAttr(placement=Shard(0, 'tp'))",
        "merge_selected_rows get_tensor_from_selected_rows": _ROWS,
        "continuous_value_model hash similarity_focus": "write it in the reader, before the batch is fed",
        "random_crop sampling_id": "draw in the reader, or with layers.uniform_random",
        "add_position_encoding": "add a table: x * alpha + layers.assign(encoding) * beta",
        "temporal_shift fsp_matrix": "write it with layers.reshape, layers.concat and layers.matmul",
        "psroi_pool prroi_pool deformable_conv deformable_roi_pooling prior_box density_prior_box multi_box_head bipartite_match "
        "target_assign detection_output ssd_loss rpn_target_assign retinanet_target_assign sigmoid_focal_loss anchor_generator "
        "roi_perspective_transform generate_proposal_labels generate_proposals generate_mask_labels iou_similarity box_coder "
        "polygon_box_transform yolov3_loss yolo_box box_clip locality_aware_nms matrix_nms retinanet_detection_output "
        "distribute_fpn_proposals box_decoder_and_assign collect_fpn_proposals": _DETECTION,
        "Uniform Normal Categorical MultivariateNormalDiag": "draw with layers.uniform_random or gaussian_random; write densities with "
        "layers.*",
        "tensor_array_to_tensor": "write layers.concat or layers.stack of what layers.array_read gives",
        "load": "write io.load(program, path) or io.load_vars",
        "log1p": "write layers.log(x + 1.0)",
        "logsumexp": "write m + layers.log(layers.reduce_sum(layers.exp(x - m), dim=-1, keep_dim=True)), with m = layers.reduce_max(...)",
        "clamp": "write layers.clip",
        "addmm": "write x * beta + layers.matmul(a, b, alpha=alpha)",
        "addcmul": "write x + value * a * b",
        "nonzero": "write layers.where(condition)",
        "index_select": "write layers.gather",
        "index_sample": "write layers.gather_nd",
        "dist": "write layers.sqrt(layers.reduce_sum(layers.square(x - y)))",
        "dot": "write layers.reduce_sum(x * y, dim=-1, keep_dim=True)",
        "t": "write layers.transpose(x, [1, 0])",
        "cross": "write the formula with slices of the axis",
        "interpolate": "write layers.image_resize",
        "diag_embed trace": "write layers.eye(n) * ...",
        "meshgrid": "write layers.expand(layers.unsqueeze(x, [1]), [1, n])",
        "mish": "write x * layers.tanh(layers.softplus(x))",
        "randint randn randperm": "write layers.gaussian_random or layers.uniform_random",
        "elementwise_equal": "write layers.equal",
        "allclose": "write layers.reduce_all(layers.abs(x - y) <= tolerance)",
        "roll": "write layers.concat of two slices",
        "full": "write layers.fill_constant",
        "full_like": "write layers.ones_like(x) * value",
        "arange": "write layers.range",
        "kron": "write layers.einsum and layers.reshape",
        "is_empty": "write layers.equal(layers.size(x), layers.fill_constant([1], 'int64', 0))",
        "deprecated generate_layer_fn generate_activation_fn autodoc templatedoc": "it is of fluid's own inside; nothing takes its place",
    },
    "io": {"DatasetLoader": _DATASET, "default_collate_fn": "batches are tuples of arrays: DataLoader.set_batch_generator"},
    "nets": {
        "sequence_conv_pool": "sequences are padded: write layers.conv2d over [batch, 1, time, width], then layers.reduce_max over time",
    },
    "profiler": {"cuda_profiler": "write profiler.profiler(), whose tables and timelines are of the plan that ran"},
    "metrics": {"DetectionMAP": _DETECTION},
    "core": {
        "LoDTensor LoDTensorArray Tensor": _LOD + "; feed NumPy arrays",
        "VarBase": _DYGRAPH,
        "AnalysisConfig PaddleTensor create_paddle_predictor": "write io.load_inference_model and Executor.run",
        "SelectedRows": _ROWS,
    },
    "framework": {
        "dygraph_only": _DYGRAPH,
        "ComplexVariable": "there are no complex numbers",
        "load_op_library": "declare an operator in Python: a class of fluidx.ir.OpDef",
    },
    "transpiler": {"GeoSgdTranspiler Collective GradAllReduce LocalSGD": "write DistributeTranspiler(strategies.data_parallel())"},
    "contrib": {
        "slim quantize Compressor QuantizeTranspiler": "fx.quantize quantizes a program after training, or trains it for 8-bit integers",
        "decoder BeamSearchDecoder TrainingDecoder InitState StateCell": _BEAM,
        "layers basic_lstm BasicLSTMUnit basic_gru BasicGRUUnit": "write layers.rnn with layers.LSTMCell or layers.GRUCell",
        "memory_usage op_freq_statistic": "fluidx show and fluidx.profiler say what a program takes",
        "extend_with_decoupled_weight_decay extend_optimizer": "write optimizer.AdamW",
        "reader distributed_batch_reader": "write io.batch; launched ranks take their rows of the batch by themselves",
        "utils HDFSClient": "read and write files with other packages",
        "model_stat summary": "print(program), or fluidx show",
    },
}

_ANSWERS = {module: {n: answer for names, answer in of.items() for n in names.split()} for module, of in NOT_HERE.items()}


def answer(module: str, name: str) -> str | None:
    """The hint for a name of fluid; None if it is not in the table.

    >>> answer("layers", "clamp")
    'write layers.clip'
    """
    return _ANSWERS.get(module, {}).get(name)


_PLACES = ("layers", "io", "optimizer", "initializer", "nets", "metrics", "core", "framework")


def _elsewhere(module: str, name: str) -> str | None:
    """A hint that names another module which has the name, or what to write instead. None for a submodule: the import system asks for it
    before it loads it."""
    beside = os.path.join(os.path.dirname(__file__), module, name)
    if name.startswith("_") or os.path.exists(beside) or os.path.exists(f"{beside}.py"):
        return None
    for other in ("", *_PLACES):
        if other == module:
            continue
        if name in getattr(import_module(f"fluidx{other and '.' + other}"), "__all__", ()):
            return f"it is fluidx{other and '.' + other}.{name}"
    return next((said for other in NOT_HERE if (said := answer(other, name)) is not None), None)


def missing(module: str, name: str, options: Iterable[str], kind: str = "") -> AttributeError:
    """The error for a name that a module does not have: with the table's hint, else the most similar of `options`."""
    if name.startswith("_"):  # also asked by `from . import _state`, where a hint would import the modules that are being imported
        return AttributeError(f"module 'fluidx{module and '.' + module}' has no attribute {name!r}")
    hint = answer(module, name) or _elsewhere(module, name) or nearest(name, options, "it has")
    return AttributeError(f"fluidx{module and '.' + module} has no {kind and kind + ' '}{name!r}; {hint}")


def module_getattr(module: str, names: Iterable[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module: names that it does not have end in `missing`."""

    def __getattr__(name: str) -> Any:
        raise missing(module, name, names)

    return __getattr__


def as_markdown() -> str:
    """The table as docs/migration.md shows it."""
    lines = ["| fluid 1.8 | here |", "|---|---|"]
    for module, rows in NOT_HERE.items():
        prefix = f"{module}." if module else "fluid."
        for names, said in rows.items():
            first, *others = names.split()
            shown = f"`{prefix}{first}`" + "".join(f", `{n}`" for n in others)
            lines.append(f"| {shown} | {said.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
