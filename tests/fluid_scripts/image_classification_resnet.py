import numpy

import fluidx as fluid


def conv_bn_layer(input, ch_out, filter_size, stride, padding, act="relu", bias_attr=False):
    tmp = fluid.layers.conv2d(
        input=input, filter_size=filter_size, num_filters=ch_out, stride=stride, padding=padding, act=None, bias_attr=bias_attr
    )
    return fluid.layers.batch_norm(input=tmp, act=act)


def shortcut(input, ch_in, ch_out, stride):
    if ch_in != ch_out:
        return conv_bn_layer(input, ch_out, 1, stride, 0, None)
    return input


def basicblock(input, ch_in, ch_out, stride):
    tmp = conv_bn_layer(input, ch_out, 3, stride, 1)
    tmp = conv_bn_layer(tmp, ch_out, 3, 1, 1, act=None, bias_attr=True)
    short = shortcut(input, ch_in, ch_out, stride)
    return fluid.layers.elementwise_add(x=tmp, y=short, act="relu")


images = fluid.data(name="pixel", shape=[None, 3, 8, 8], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
conv1 = conv_bn_layer(images, ch_out=4, filter_size=3, stride=1, padding=1)
res1 = basicblock(conv1, 4, 4, 1)
res2 = basicblock(res1, 4, 8, 2)
pool = fluid.layers.pool2d(input=res2, pool_size=4, pool_type="avg", pool_stride=1)
predict = fluid.layers.fc(input=pool, size=4, act="softmax")
cost = fluid.layers.cross_entropy(input=predict, label=label)
avg_cost = fluid.layers.mean(cost)
accuracy = fluid.layers.accuracy(input=predict, label=label)
boundaries, values = [4, 8], [0.05, 0.02, 0.01]
optimizer = fluid.optimizer.Momentum(
    learning_rate=fluid.layers.piecewise_decay(boundaries=boundaries, values=values),
    momentum=0.9,
    regularization=fluid.regularizer.L2Decay(1e-4),
)
optimizer.minimize(avg_cost)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = numpy.random.RandomState(0)
for step in range(6):
    y = rng.randint(0, 4, [8, 1]).astype("int64")
    x = rng.normal(size=[8, 3, 8, 8]).astype("float32")
    x[:, 0] += y[:, :, None]
    loss, acc = exe.run(feed={"pixel": x, "label": y}, fetch_list=[avg_cost, accuracy])
assert numpy.isfinite(loss).all() and 0.0 <= acc[0] <= 1.0
