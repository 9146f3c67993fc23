import numpy as np

import fluidx as fluid

img = fluid.data(name="img", shape=[None, 5], dtype="float32")
hidden = fluid.layers.fc(input=img, size=4)
loss = fluid.layers.mean(hidden * hidden)
optimizer = fluid.optimizer.Momentum(learning_rate=0.1, momentum=0.9)
optimizer.minimize(loss)
model_average = fluid.optimizer.ModelAverage(0.15, min_average_window=100, max_average_window=200)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
scope = fluid.global_scope()
seen = []
x = np.random.RandomState(0).normal(size=[4, 5]).astype("float32")
for _ in range(5):
    exe.run(feed={"img": x}, fetch_list=[loss.name])
    seen.append(np.array(scope.find_var("fc_0.w_0").get_tensor()))
with model_average.apply(exe):
    averaged = np.array(scope.find_var("fc_0.w_0").get_tensor())
assert np.allclose(averaged, np.mean(seen, axis=0), atol=1e-6)
assert np.array_equal(np.array(scope.find_var("fc_0.w_0").get_tensor()), seen[-1])
