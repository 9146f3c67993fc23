import os
import tempfile

import numpy as np

import fluidx as fluid

img = fluid.data(name="img", shape=[None, 4], dtype="float32")
predict = fluid.layers.fc(input=img, size=3, act="softmax")
loss = fluid.layers.mean(predict)
fluid.optimizer.Adam(1e-3).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
compiled = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(loss_name=loss.name, places=fluid.cpu_places(2))
x = np.ones((4, 4), "float32")
exe.run(compiled, feed={"img": x}, fetch_list=[loss])
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model")
    fluid.io.save_inference_model(dirname=path, feeded_var_names=["img"], target_vars=[predict], executor=exe)
    fluid.io.save_persistables(exe, os.path.join(folder, "all"), fluid.default_main_program())
    fluid.save(fluid.default_main_program(), os.path.join(folder, "saved"))
    state = fluid.load_program_state(os.path.join(folder, "saved"))
    (expected,) = exe.run(fluid.default_main_program().clone(for_test=True), feed={"img": x}, fetch_list=[predict])
    with fluid.scope_guard(fluid.Scope()):
        program, feed_names, targets = fluid.io.load_inference_model(path, exe)
        (found,) = exe.run(program, feed={feed_names[0]: x}, fetch_list=targets)
assert np.array_equal(found, expected) and "fc_0.w_0" in state
