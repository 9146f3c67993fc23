"""What tests of `fx.onnx.save` share: operators alone and nets as programs, with ONNX Runtime as the judge."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

import fluidx as fx
from fluidx.ir.opdef import OPS
from fluidx.onnx.export import to_onnx
from fluidx.onnx.export_graph import has_nodes
from fluidx.onnx.table import load_all
from fluidx.testing.one_operator import program_of_sample

load_all()
# operators that run blocks or write what loops keep, and those on sequences, optionals and strings, which have no samples, have files of
# their own: test_control_export.py, test_values_export.py
WITH_NODES = [n for n, d in OPS.items() if not (d.control.bodies or d.storage.same_variable) and has_nodes(n)]
ALL = sorted(n for n in WITH_NODES if OPS[n].control.beyond_tensors == () or any(OPS[n].samples()))
IN_STEPS = [n for n in ALL if "_grad" in n or n == "ema_update" or any(s.name == "ParamOut" for s in OPS[n].out_slots)]  # of training alone
WRITTEN = [n for n in ALL if n not in IN_STEPS]
# Both sides sum float32 in their own orders: a few units in the last place of sums of at most hundreds of terms. In 16 bits fluidx rounds
# what an operator makes once, the runtime after every node: two units in the last place.
CLOSE = {"float16": 2e-3, "bfloat16": 1.6e-2}


STATE = ort.capi.onnxruntime_pybind11_state
LACKS = STATE.NotImplemented, STATE.InvalidGraph, STATE.Fail


def session_of(model):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session, feed):
    return session.run(None, {i.name: np.array(feed[i.name], order="C") for i in session.get_inputs()})


def close(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    limit = CLOSE.get(expected.dtype.name, 1e-5)
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit)


# operator -> how many of its samples opset 21 has no form for: products of transposed vectors and 16-bit integers, windows of several
# sizes, shifts of signed integers, division by the number of labels
REFUSED = {"matmul": 4, "matmul_n_bits": 5, "pool2d": 2, "shift_left": 6, "shift_right": 6, "sigmoid_cross_entropy_with_logits": 1}


def exported_samples(name, opset=21):
    """(program, fetches, feed, model) of each sample with an ONNX form; REFUSED has the number of the others."""
    refused = 0
    for sample in OPS[name].samples():
        program, fetches, feed = program_of_sample(name, sample)
        try:
            model = to_onnx(program, None, fetches, opset=opset)
        except fx.onnx.OnnxError as e:
            assert "cannot be written as ONNX" in str(e)
            refused += 1
        else:
            yield program, fetches, feed, model
    assert opset != 21 or refused == REFUSED.get(name, 0)


def judged_samples(name, opset):
    """The number of samples of an operator that the runtime computes as nodes of an opset, with the results of fluidx."""
    judged = 0
    for program, fetches, feed, model in exported_samples(name, opset):
        if name == "elementwise_pow" and feed["Y0"].dtype.kind == "i":
            continue  # negative powers of integers, of which ONNX says nothing
        if "bfloat16" in {v.dtype for v in program.list_vars()}:
            continue  # which the runtime does not take from NumPy
        try:
            session = session_of(model)
        except LACKS:
            continue  # ONNX has it for these types, the runtime has not
        judged += 1
        expected = fx.Executor(fx.CPUPlace()).run(program, feed=feed, fetch_list=fetches)
        for a, b in zip(run(session, feed), expected, strict=True):
            close(a, b)
    return judged


# -- nets ----------------------------------------------------------------------------------------------------------------------


def lenet():
    image = fx.data("image", [-1, 1, 12, 12], "float32")
    hidden = fx.layers.batch_norm(fx.layers.conv2d(image, 6, 3, padding=1), act="relu")
    hidden = fx.layers.pool2d(hidden, 2, "max", 2)
    hidden = fx.layers.dropout(fx.layers.fc(hidden, 16, act="tanh"), 0.25)
    return fx.layers.fc(hidden, 5)


def transformer():
    ids = fx.data("ids", [-1, 6], "int64")
    hidden = fx.embedding(ids, [11, 8])
    wide = fx.layers.layer_norm(hidden, begin_norm_axis=2)
    heads = [fx.layers.reshape(fx.layers.fc(wide, 8, num_flatten_dims=2), [0, 6, 2, 4]) for _ in range(3)]
    q, k, v = (fx.layers.transpose(h, [0, 2, 1, 3]) for h in heads)
    weights = fx.layers.softmax(fx.layers.matmul(q, k, transpose_y=True, alpha=0.5))
    joined = fx.layers.reshape(fx.layers.transpose(fx.layers.matmul(weights, v), [0, 2, 1, 3]), [0, 6, 8])
    hidden = hidden + joined
    hidden = hidden + fx.layers.fc(fx.layers.gelu(fx.layers.fc(hidden, 16, num_flatten_dims=2)), 8, num_flatten_dims=2)
    return fx.layers.fc(fx.layers.reduce_mean(hidden, dim=[1]), 3)


def built(net, train=True):
    main, startup = fx.Program(net.__name__), fx.Program()
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup), fx.unique_name.guard():
        y = net()
        if train:
            label = fx.data("label", [-1, 1], "int64")
            fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(fx.layers.softmax_with_cross_entropy(y, label)))
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    rng = np.random.default_rng(0)
    feed = {"image": rng.standard_normal((4, 1, 12, 12), "float32"), "ids": rng.integers(0, 11, (4, 6))}
    feed = {n: a for n, a in {**feed, "label": rng.integers(0, 3, (4, 1))}.items() if main.global_block().has_var(n)}
    if train:
        exe.run(main, feed=feed, scope=scope)
    return main, y, exe, scope, {n: a for n, a in feed.items() if n != "label"}
