import numpy

import fluidx as fluid

BATCH_SIZE = 20


def housing(n, seed):
    def reader():
        rng = numpy.random.RandomState(seed)
        weights = numpy.linspace(-1.0, 1.0, 13)
        for _ in range(n):
            features = rng.uniform(-1, 1, 13)
            yield features.astype("float32"), numpy.array([features.dot(weights) + 3.0], dtype="float32")

    return reader


train_reader = fluid.io.batch(fluid.io.shuffle(housing(200, 0), buf_size=500), batch_size=BATCH_SIZE)
test_reader = fluid.io.batch(housing(40, 1), batch_size=BATCH_SIZE)

x = fluid.data(name="x", shape=[None, 13], dtype="float32")
y = fluid.data(name="y", shape=[None, 1], dtype="float32")
y_predict = fluid.layers.fc(input=x, size=1, act=None)

main_program = fluid.default_main_program()
startup_program = fluid.default_startup_program()
cost = fluid.layers.square_error_cost(input=y_predict, label=y)
avg_loss = fluid.layers.mean(cost)
test_program = main_program.clone(for_test=True)
sgd_optimizer = fluid.optimizer.SGD(learning_rate=0.1)
sgd_optimizer.minimize(avg_loss)

use_cuda = False
place = fluid.CUDAPlace(0) if use_cuda else fluid.CPUPlace()
exe = fluid.Executor(place)


def train_test(executor, program, reader, feeder, fetch_list):
    accumulated = 1 * [0]
    count = 0
    for data_test in reader():
        outs = executor.run(program=program, feed=feeder.feed(data_test), fetch_list=fetch_list)
        accumulated = [x_c[0] + x_c[1][0] for x_c in zip(accumulated, outs)]
        count += 1
    return [x_d / count for x_d in accumulated]


feeder = fluid.DataFeeder(place=place, feed_list=[x, y])
exe.run(startup_program)
first = None
for pass_id in range(8):
    for data_train in train_reader():
        (avg_loss_value,) = exe.run(main_program, feed=feeder.feed(data_train), fetch_list=[avg_loss])
        first = float(avg_loss_value[0]) if first is None else first
test_metrics = train_test(exe, test_program, test_reader, feeder, fetch_list=[avg_loss.name])
assert test_metrics[0] < first / 10, (first, test_metrics)
