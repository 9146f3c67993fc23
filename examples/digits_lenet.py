"""LeNet on scikit-learn's handwritten digits, on 1 device and on N ranks."""

from common import Model, compare, minibatches
from sklearn.datasets import load_digits

import fluidx as fx


def build() -> Model:
    data = load_digits()
    x = (data.images / 16).astype("float32").reshape(-1, 1, 8, 8)
    y = data.target.reshape(-1, 1).astype("int64")
    main, startup = fx.Program("digits_lenet"), fx.Program("digits_lenet_startup")
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup):
        image = fx.data("image", [-1, 1, 8, 8], "float32")
        label = fx.data("label", [-1, 1], "int64")
        maps = fx.nets.simple_img_conv_pool(image, num_filters=8, filter_size=3, pool_size=2, pool_stride=2, conv_padding=1, act="relu")
        maps = fx.nets.simple_img_conv_pool(maps, num_filters=16, filter_size=3, pool_size=2, pool_stride=2, conv_padding=1, act="relu")
        hidden = fx.layers.fc(maps, 64, act="relu")
        logits = fx.layers.fc(hidden, 10)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label))
        accuracy = fx.layers.accuracy(fx.layers.softmax(logits), label)
        fx.optimizer.Adam(learning_rate=0.003).minimize(loss)
    train, test = {"image": x[:1500], "label": y[:1500]}, {"image": x[1500:], "label": y[1500:]}
    return Model(main, startup, loss, {"test accuracy": accuracy}, lambda epoch: minibatches(train, 64, epoch), test)


if __name__ == "__main__":
    compare("digits LeNet", build, epochs=6)
