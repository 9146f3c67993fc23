# refused: classes are not sampled: write layers.softmax_with_cross_entropy over all of them
import fluidx as fluid

x = fluid.data("x", [None, 8], "float32")
label = fluid.data("label", [None, 1], "int64")
loss = fluid.layers.nce(input=x, label=label, num_total_classes=100, num_neg_samples=5)
