"""Rules of ops that multiply matrices: matmuls, convolutions, attention, recurrent networks, linear algebra."""

# They fill RULES.
from flopmeter.costs.contractions import attention, convolution, fused_layers, linalg, matmul, quantized, rnn  # noqa: F401
