import numpy as np

import fluidx as fluid

image = fluid.data(name="image", shape=[None, 12], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
loader = fluid.io.DataLoader.from_generator(feed_list=[image, label], capacity=2, iterable=False)
predict = fluid.layers.fc(image, size=3, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=label))
fluid.optimizer.SGD(learning_rate=0.01).minimize(loss)


def samples():
    rng = np.random.RandomState(0)
    for _ in range(20):
        yield rng.normal(size=[12]).astype("float32"), rng.randint(0, 3)


loader.set_sample_generator(samples, batch_size=6, drop_last=True)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
steps = []
for epoch_id in range(2):
    loader.start()
    batches = 0
    try:
        while True:
            exe.run(fetch_list=[loss])
            batches += 1
    except fluid.core.EOFException:
        loader.reset()
    steps.append(batches)
assert steps == [3, 3], steps
