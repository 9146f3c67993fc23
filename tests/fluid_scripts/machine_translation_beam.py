# refused: there is no beam search: decode step by step with layers.while_loop and layers.topk
import fluidx.layers as layers

cell = layers.GRUCell(hidden_size=8)
decoder = layers.BeamSearchDecoder(cell, start_token=0, end_token=1, beam_size=4)
outputs, _ = layers.dynamic_decode(decoder, inits=None, max_step_num=8)
