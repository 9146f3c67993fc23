import numpy as np

import fluidx as fluid

image = fluid.data(name="image", shape=[None, 3, 8, 8], dtype="float32")
label = fluid.data(name="mask", shape=[None, 8, 8, 1], dtype="int64")
x = fluid.layers.conv2d(image, 6, 3, padding=1, act="relu")
x = fluid.layers.conv2d(x, 2, 1)
prediction = fluid.layers.softmax(fluid.layers.transpose(x, perm=[0, 2, 3, 1]))
loss = fluid.layers.dice_loss(input=prediction, label=label)
fluid.optimizer.RMSProp(learning_rate=0.01).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(0)
x = rng.normal(size=[2, 3, 8, 8]).astype("float32")
feed = {"image": x, "mask": (x[:, 0] > 0).astype("int64")[..., None]}
losses = [float(exe.run(feed=feed, fetch_list=[loss])[0][0]) for _ in range(6)]
assert losses[-1] < losses[0], losses
