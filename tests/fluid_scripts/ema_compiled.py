import numpy as np

import fluidx as fluid

data = fluid.data(name="x", shape=[None, 5], dtype="float32")
hidden = fluid.layers.fc(input=data, size=10, param_attr=fluid.ParamAttr(name="w"))
cost = fluid.layers.mean(hidden * hidden)
test_program = fluid.default_main_program().clone(for_test=True)
optimizer = fluid.optimizer.Adam(learning_rate=0.01)
optimizer.minimize(cost)
global_steps = fluid.layers.autoincreased_step_counter()
ema = fluid.optimizer.ExponentialMovingAverage(0.999, thres_steps=global_steps)
ema.update()
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
train = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(loss_name=cost.name, places=fluid.cpu_places(2))
x = np.random.RandomState(0).normal(size=[6, 5]).astype("float32")
for _ in range(4):
    exe.run(program=train, feed={"x": x}, fetch_list=[cost.name])
trained = np.array(fluid.global_scope().find_var("w").get_tensor())
with ema.apply(exe):
    averaged = np.array(fluid.global_scope().find_var("w").get_tensor())
    exe.run(program=test_program, feed={"x": x}, fetch_list=[cost.name])
assert not np.array_equal(trained, averaged)
assert np.array_equal(np.array(fluid.global_scope().find_var("w").get_tensor()), trained)
