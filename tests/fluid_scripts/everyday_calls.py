import numpy as np

import fluidx as fluid
from fluidx import core
from fluidx.framework import Parameter, Variable, default_main_program, grad_var_name
from fluidx.initializer import force_init_on_cpu, init_on_cpu
from fluidx.layer_helper import LayerHelper

fluid.require_version("1.6.0")
assert not fluid.in_dygraph_mode()
fluid.set_flags({"FLAGS_eager_delete_tensor_gb": 0.0})
assert fluid.get_flags(["FLAGS_eager_delete_tensor_gb"]) == {"FLAGS_eager_delete_tensor_gb": 0.0}
place = core.CUDAPlace(0) if core.is_compiled_with_cuda() and core.get_cuda_device_count() > 8 else core.CPUPlace()
pinned = fluid.CUDAPinnedPlace()
assert not force_init_on_cpu()

x = fluid.layers.data("x", shape=[4], dtype=core.VarDesc.VarType.FP32)
assert isinstance(x, Variable) and "f32" in str(x.type)
with init_on_cpu():
    step = fluid.layers.create_global_var(shape=[1], value=0.0, dtype="float32", persistable=True, name="step")
bias = fluid.layers.create_parameter([3], "float32", name="bias")
out = fluid.layers.fc(x, 3, param_attr=fluid.WeightNormParamAttr(dim=1, name="normed"), bias_attr=False)
if bias:
    out = fluid.layers.elementwise_add(out, bias)
out.error_clip = fluid.clip.ErrorClipByValue(max=0.1)
loss = fluid.layers.mean(out)
with default_main_program()._lr_schedule_guard():
    rate = fluid.layers.scale(step, 0.0, bias=0.1)
fluid.optimizer.Momentum(learning_rate=rate, momentum=0.9).minimize(loss)
fluid.memory_optimize(fluid.default_main_program())
fluid.release_memory(fluid.default_main_program())


def scaled_fc(input, size, param_attr=None, bias_attr=None, act=None, name=None):
    helper = LayerHelper("scaled_fc", **locals())
    dtype = helper.input_dtype()
    w = helper.create_parameter(attr=helper.param_attr, shape=[input.shape[1], size], dtype=dtype, is_bias=False)
    out = helper.create_variable_for_type_inference(dtype)
    helper.append_op(type="mul", inputs={"X": input, "Y": w}, outputs={"Out": out}, attrs={"x_num_col_dims": 1, "y_num_col_dims": 1})
    return helper.append_activation(helper.append_bias_op(out))


custom = scaled_fc(x, 2, act="tanh")
assert custom.shape == (-1, 2)
assert grad_var_name("x") == "x@GRAD"
parameters = fluid.io.get_program_parameter(fluid.default_main_program())
assert {p.name for p in parameters} >= {"normed_v", "normed_g", "bias"} and all(isinstance(p, Parameter) for p in parameters)
assert any(fluid.io.is_persistable(v) and not fluid.io.is_parameter(v) for v in fluid.default_main_program().list_vars())
pruned = fluid.default_main_program()._prune([out])
assert [op.type for op in pruned.global_block().ops][-1] == "elementwise_add"

scope = fluid.Scope()
child = scope.new_scope()
exe = fluid.Executor(place)
with fluid.scope_guard(scope):
    exe.run(fluid.default_startup_program())
    exe.run(feed=[{"x": np.ones((2, 4), "float32")}], fetch_list=[loss])
assert child.find_var("normed_v") is not None and scope.find_var("missing") is None
assert fluid.transpiler.RoundRobin(["a:1", "b:2"]).dispatch(parameters)[:2] == ["a:1", "b:2"]
assert len(fluid.transpiler.HashName(["a:1", "b:2"]).dispatch(parameters)) == 5
