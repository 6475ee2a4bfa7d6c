"""Rules of ops that multiply matrices: matmuls, convolutions, attention, recurrent networks, linear algebra."""

from flopmeter.costs.contractions import (  # noqa: F401  (they fill RULES)
    attention,
    convolution,
    fused_layers,
    linalg,
    matmul,
    quantized,
    rnn,
)
