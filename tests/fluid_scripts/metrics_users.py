import numpy as np

import fluidx as fluid

data = fluid.data(name="img", shape=[None, 6], dtype="float32")
label = fluid.data(name="label", shape=[None, 1], dtype="int64")
prediction = fluid.layers.fc(data, 2, act="softmax")
batch_acc = fluid.layers.accuracy(input=prediction, label=label)
auc_out, batch_auc_out, states = fluid.layers.auc(input=prediction, label=label, num_thresholds=200, slide_steps=3)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())

accuracy = fluid.metrics.Accuracy()
auc = fluid.metrics.Auc(name="auc", num_thresholds=200)
precision, recall = fluid.metrics.Precision(), fluid.metrics.Recall()
composite = fluid.metrics.CompositeMetric()
composite.add_metric(precision)
composite.add_metric(recall)
average = fluid.average.WeightedAverage()
rng = np.random.RandomState(0)
accuracy.reset()
for _ in range(4):
    feed = {"img": rng.normal(size=[16, 6]).astype("float32"), "label": rng.randint(0, 2, [16, 1])}
    acc_np, auc_np, pred = exe.run(feed=feed, fetch_list=[batch_acc, auc_out, prediction])
    accuracy.update(value=acc_np, weight=16)
    auc.update(preds=pred, labels=feed["label"])
    composite.update(preds=pred[:, 1:], labels=feed["label"])
    average.add(value=acc_np, weight=16)
assert abs(auc.eval() - float(auc_np[0])) < 1e-6, (auc.eval(), auc_np)
assert abs(accuracy.eval() - float(average.eval()[0])) < 1e-6
assert len(composite.eval()) == 2
