import numpy

import fluidx as fluid

x = fluid.layers.data(name="X", shape=[1], dtype="float32")
hidden = fluid.layers.fc(input=x, size=10)
loss = fluid.layers.mean(hidden)
optimizer = fluid.optimizer.Dpsgd(learning_rate=0.01, clip=10.0, batch_size=16.0, sigma=1.0)
optimizer.minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
data = numpy.random.random(size=(10, 1)).astype("float32")
(value,) = exe.run(feed={"X": data}, fetch_list=[loss.name])
assert numpy.isfinite(value).all()
