import numpy as np

import fluidx as fluid


def create_tmp_var(name, dtype, shape):
    return fluid.default_main_program().current_block().create_var(name=name, dtype=dtype, shape=shape)


def tanh(x):
    return np.tanh(x)


def tanh_grad(y, dy):
    return np.array(dy) * (1 - np.square(np.array(y)))


seen = []


def debug_func(x):
    seen.append(np.array(x).shape)


img = fluid.data(name="img", shape=[None, 8], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
hidden = img
for idx in range(2):
    hidden = fluid.layers.fc(hidden, size=6)
    new_hidden = create_tmp_var(name=f"hidden_{idx}", dtype=hidden.dtype, shape=hidden.shape)
    hidden = fluid.layers.py_func(
        func=tanh, x=hidden, out=new_hidden, backward_func=tanh_grad, skip_vars_in_backward_input=hidden
    )
    fluid.layers.py_func(func=debug_func, x=hidden, out=None)
prediction = fluid.layers.fc(hidden, size=3, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(input=prediction, label=label))
fluid.optimizer.SGD(learning_rate=0.5).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(0)
feed = {"img": rng.normal(size=[6, 8]).astype("float32"), "label": rng.randint(0, 3, [6, 1])}
losses = [float(exe.run(feed=feed, fetch_list=[loss])[0][0]) for _ in range(10)]
assert losses[-1] < losses[0], losses
assert seen and set(seen) == {(6, 6)}, seen
