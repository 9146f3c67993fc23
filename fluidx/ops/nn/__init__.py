"""What neural networks are built of: convolution, pooling, normalization, dropout, embedding and softmax."""
