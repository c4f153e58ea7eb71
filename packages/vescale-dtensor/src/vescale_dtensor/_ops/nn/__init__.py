"""Layers: attention, convolution, pooling, embedding, normalisation, recurrent networks."""
