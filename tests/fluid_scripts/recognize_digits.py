import numpy as np

import fluidx as fluid


def digits(n):
    def reader():
        rng = np.random.RandomState(1)
        for _ in range(n):
            label = rng.randint(10)
            image = rng.normal(0, 0.1, [1, 12, 12]).astype("float32")
            image[0, label, :] += 1.0
            yield image, label

    return reader


def convolutional_neural_network(img):
    conv_pool_1 = fluid.nets.simple_img_conv_pool(input=img, filter_size=3, num_filters=4, pool_size=2, pool_stride=2, act="relu")
    conv_pool_1 = fluid.layers.batch_norm(conv_pool_1)
    conv_pool_2 = fluid.nets.simple_img_conv_pool(input=conv_pool_1, filter_size=3, num_filters=6, pool_size=2, pool_stride=2, act="relu")
    return fluid.layers.fc(input=conv_pool_2, size=10, act="softmax")


prog = fluid.default_main_program()
startup_prog = fluid.default_startup_program()
prog.random_seed = 90
startup_prog.random_seed = 90

img = fluid.data(name="img", shape=[None, 1, 12, 12], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
prediction = convolutional_neural_network(img)
cost = fluid.layers.cross_entropy(input=prediction, label=label)
avg_loss = fluid.layers.mean(cost)
acc = fluid.layers.accuracy(input=prediction, label=label)
test_program = prog.clone(for_test=True)
optimizer = fluid.optimizer.Adam(learning_rate=0.02)
optimizer.minimize(avg_loss)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(startup_prog)
feeder = fluid.DataFeeder(feed_list=[img, label], place=fluid.CPUPlace())
for epoch_id in range(3):
    for step, data in enumerate(fluid.io.batch(digits(96), 16)()):
        metrics = exe.run(prog, feed=feeder.feed(data), fetch_list=[avg_loss, acc])
acc_set = []
for test_data in fluid.io.batch(digits(64), 32)():
    (acc_np,) = exe.run(program=test_program, feed=feeder.feed(test_data), fetch_list=[acc])
    acc_set.append(float(acc_np[0]))
assert np.array(acc_set).mean() > 0.5, acc_set
