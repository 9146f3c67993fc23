# refused: fluidx.layers has no layer 'dynamic_lstm'; sequences are padded: write layers.rnn(LSTMCell(size)
import fluidx as fluid

emb = fluid.data(name="emb", shape=[None, 16], dtype="float32")
fc1 = fluid.layers.fc(input=emb, size=32)
lstm1, cell1 = fluid.layers.dynamic_lstm(input=fc1, size=32)
