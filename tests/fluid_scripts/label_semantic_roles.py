# refused: fluidx.layers has no layer 'linear_chain_crf'; there is no CRF
import fluidx as fluid

word = fluid.data(name="word_data", shape=[None, 1], dtype="int64")
target = fluid.data(name="target", shape=[None, 1], dtype="int64")
emb = fluid.embedding(input=word, size=[100, 8], param_attr="emb")
feature_out = fluid.layers.fc(input=emb, size=9)
crf_cost = fluid.layers.linear_chain_crf(input=feature_out, label=target, param_attr=fluid.ParamAttr(name="crfw", learning_rate=0.01))
avg_cost = fluid.layers.mean(crf_cost)
