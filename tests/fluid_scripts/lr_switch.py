import numpy as np

import fluidx as fluid


def warmup_then_decay(learning_rate, warmup_steps, decay_steps):
    lr = fluid.layers.create_global_var(shape=[1], value=0.0, dtype="float32", persistable=True, name="learning_rate")
    global_step = fluid.layers.learning_rate_scheduler.autoincreased_step_counter()
    step = fluid.layers.cast(global_step, "float32")
    with fluid.layers.control_flow.Switch() as switch:
        with switch.case(step < float(warmup_steps)):
            fluid.layers.assign(input=learning_rate * (step / float(warmup_steps)), output=lr)
        with switch.default():
            decayed = fluid.layers.exponential_decay(learning_rate, decay_steps, 0.5, staircase=True)
            fluid.layers.assign(input=decayed, output=lr)
    return lr


x = fluid.layers.data(name="x", shape=[3], dtype="float32")
y = fluid.layers.data(name="y", shape=[1], dtype="float32")
loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
rate = warmup_then_decay(0.1, 4, 3)
fluid.optimizer.SGD(rate).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
feed = {"x": np.ones((2, 3), "float32"), "y": np.ones((2, 1), "float32")}
rates = [round(float(exe.run(feed=feed, fetch_list=[rate])[0][0]), 4) for _ in range(8)]
assert rates[0] < rates[1] < rates[2] and rates[-1] < 0.1, rates
