import numpy as np

import fluidx as fluid

x = fluid.layers.data(name="x", shape=[2], dtype="float32")
label = fluid.layers.data(name="label", shape=[1], dtype="int64")
y = fluid.layers.fc(input=[x], size=2, act="softmax")
loss = fluid.layers.cross_entropy(input=y, label=label)
loss = fluid.layers.mean(x=loss)
sgd = fluid.optimizer.SGD(learning_rate=0.01)
optimizer = fluid.optimizer.LookaheadOptimizer(sgd, alpha=0.5, k=5)
optimizer.minimize(loss)
main_program = fluid.default_main_program()
place = fluid.CPUPlace()
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())
feeder = fluid.DataFeeder(feed_list=[x, label], place=place)


def train_reader(limit=5):
    for i in range(limit):
        yield np.random.random([2]).astype("float32"), np.random.random([1]).astype("int64")


batches = fluid.io.batch(train_reader, batch_size=1)
for batch_data in batches():
    exe.run(main_program, feed=feeder.feed(batch_data))
