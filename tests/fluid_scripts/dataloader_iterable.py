import numpy as np

import fluidx as fluid

BATCH_NUM, BATCH_SIZE, EPOCH_NUM, CLASS_NUM = 4, 8, 2, 3
image = fluid.data(name="image", shape=[None, 12], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
loader = fluid.io.DataLoader.from_generator(feed_list=[image, label], capacity=4, iterable=True, use_double_buffer=True)
predict = fluid.layers.fc(image, size=CLASS_NUM, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=label))
fluid.optimizer.SGD(learning_rate=0.01).minimize(loss)


def random_batches():
    rng = np.random.RandomState(0)
    for _ in range(BATCH_NUM):
        yield rng.normal(size=[BATCH_SIZE, 12]).astype("float32"), rng.randint(0, CLASS_NUM, [BATCH_SIZE, 1]).astype("int64")


places = fluid.cuda_places() if fluid.is_compiled_with_cuda() else fluid.cpu_places()
loader.set_batch_generator(random_batches, places=places)
exe = fluid.Executor(places[0])
exe.run(fluid.default_startup_program())
prog = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(loss_name=loss.name, places=places)
steps = 0
for _ in range(EPOCH_NUM):
    for data in loader():
        exe.run(program=prog, feed=data, fetch_list=[loss])
        steps += 1
assert steps == EPOCH_NUM * (BATCH_NUM // len(places)), steps
