import numpy as np

import fluidx as fluid

image = fluid.data(name="image", shape=[None, 8], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
reader = fluid.io.PyReader(feed_list=[image, label], capacity=4, iterable=True, return_list=False)
predict = fluid.layers.fc(image, 5, act="softmax")
loss = fluid.layers.reduce_mean(fluid.layers.cross_entropy(predict, label))


def reader_creator_random_image_and_label(height):
    def reader():
        for i in range(10):
            fake_image = np.random.uniform(low=0, high=255, size=[height])
            fake_label = np.ones([1])
            yield fake_image, fake_label.astype("int64")

    return reader


user_defined_reader = reader_creator_random_image_and_label(8)
reader.decorate_sample_list_generator(fluid.io.batch(user_defined_reader, batch_size=4), fluid.core.CPUPlace())
exe = fluid.Executor(fluid.core.CPUPlace())
exe.run(fluid.default_startup_program())
sizes = []
for _ in range(2):
    for data in reader():
        exe.run(feed=data, fetch_list=[loss])
        sizes.append(np.array(data[0]["image"]).shape[0])
assert sizes == [4, 4, 2, 4, 4, 2], sizes
