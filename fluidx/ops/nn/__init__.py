"""Operators of neural networks: convolution, pooling, normalization, dropout, embedding, softmax, attention, experts and image sampling."""
