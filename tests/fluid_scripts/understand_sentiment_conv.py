# refused: lod_level=1 is not supported; pad the sequences to one length
import fluidx as fluid

data = fluid.data(name="words", shape=[None], dtype="int64", lod_level=1)
emb = fluid.embedding(input=data, size=[100, 16], is_sparse=True)
conv_3 = fluid.nets.sequence_conv_pool(input=emb, num_filters=8, filter_size=3, act="tanh", pool_type="sqrt")
