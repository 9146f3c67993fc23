import numpy as np

import fluidx as fluid

x = fluid.layers.data(name="x", shape=[6], dtype="float32")
label = fluid.layers.data(name="label", shape=[1], dtype="int64")
hidden = x
for _ in range(3):
    hidden = fluid.layers.fc(hidden, size=12, act="tanh")
loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(fluid.layers.fc(hidden, 4), label))
fluid.optimizer.Adam(learning_rate=0.01).minimize(loss)
fluid.default_startup_program().random_seed = 7
exe = fluid.Executor(fluid.CPUPlace())
rng = np.random.RandomState(0)
feed = {"x": rng.normal(size=[8, 6]).astype("float32"), "label": rng.randint(0, 4, [8, 1])}
losses = {}
for kind in (fluid.BuildStrategy.ReduceStrategy.AllReduce, fluid.BuildStrategy.ReduceStrategy.Reduce):
    with fluid.scope_guard(fluid.Scope()):
        exe.run(fluid.default_startup_program())
        build_strategy = fluid.BuildStrategy()
        build_strategy.reduce_strategy = kind
        prog = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(
            loss_name=loss.name, build_strategy=build_strategy, places=fluid.cpu_places(2)
        )
        losses[kind] = [float(exe.run(prog, feed=feed, fetch_list=[loss])[0][0]) for _ in range(4)]
first, second = losses.values()
assert np.allclose(first, second, rtol=1e-5) and first[-1] < first[0], losses
