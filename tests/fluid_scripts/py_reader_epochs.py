import numpy as np

import fluidx as fluid


def network(is_train):
    reader = fluid.layers.py_reader(
        capacity=10,
        shapes=((-1, 16), (-1, 1)),
        dtypes=("float32", "int64"),
        name="train_reader" if is_train else "test_reader",
        use_double_buffer=True,
    )
    img, label = fluid.layers.read_file(reader)
    fc1 = fluid.layers.fc(img, size=8, act="tanh", param_attr="fc1_w", bias_attr="fc1_b")
    predict = fluid.layers.fc(fc1, size=4, act="softmax", param_attr="fc2_w", bias_attr="fc2_b")
    loss = fluid.layers.cross_entropy(input=predict, label=label)
    return fluid.layers.mean(loss), reader


def batches(n):
    def reader():
        rng = np.random.RandomState(n)
        for _ in range(n):
            yield rng.normal(size=16).astype("float32"), int(rng.randint(4))

    return reader


train_prog, train_startup = fluid.Program(), fluid.Program()
with fluid.program_guard(train_prog, train_startup):
    with fluid.unique_name.guard():
        train_loss, train_reader = network(True)
        adam = fluid.optimizer.Adam(learning_rate=0.01)
        adam.minimize(train_loss)
test_prog, test_startup = fluid.Program(), fluid.Program()
with fluid.program_guard(test_prog, test_startup):
    with fluid.unique_name.guard():
        test_loss, test_reader = network(False)

place = fluid.CPUPlace()
exe = fluid.Executor(place)
exe.run(train_startup)
exe.run(test_startup)
train_reader.decorate_paddle_reader(fluid.io.shuffle(fluid.io.batch(batches(24), 6), buf_size=4))
test_reader.decorate_paddle_reader(fluid.io.batch(batches(12), 6))
counts = []
for _ in range(2):
    for prog, reader, loss in ((train_prog, train_reader, train_loss), (test_prog, test_reader, test_loss)):
        reader.start()
        n = 0
        try:
            while True:
                exe.run(program=prog, fetch_list=[loss])
                n += 1
        except fluid.core.EOFException:
            reader.reset()
        counts.append(n)
assert counts == [4, 2, 4, 2], counts
