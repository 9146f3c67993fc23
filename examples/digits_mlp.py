"""A multi-layer perceptron on scikit-learn's handwritten digits (1,797 images of 8 x 8), on 1 device and on N ranks."""

from common import Model, compare, minibatches
from sklearn.datasets import load_digits

import fluidx as fx


def build() -> Model:
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.reshape(-1, 1).astype("int64")
    main, startup = fx.Program("digits_mlp"), fx.Program("digits_mlp_startup")
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup):
        image = fx.data("image", [-1, 64], "float32")
        label = fx.data("label", [-1, 1], "int64")
        hidden = fx.layers.fc(image, 128, act="relu")
        hidden = fx.layers.fc(hidden, 64, act="relu")
        logits = fx.layers.fc(hidden, 10)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label))
        accuracy = fx.layers.accuracy(fx.layers.softmax(logits), label)
        fx.optimizer.Momentum(learning_rate=0.1, momentum=0.9).minimize(loss)
    train, test = {"image": x[:1500], "label": y[:1500]}, {"image": x[1500:], "label": y[1500:]}
    return Model(main, startup, loss, {"test accuracy": accuracy}, lambda epoch: minibatches(train, 64, epoch), test)


if __name__ == "__main__":
    compare("digits MLP", build, epochs=10)
