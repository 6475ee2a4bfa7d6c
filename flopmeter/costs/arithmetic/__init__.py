"""Rules of ops that do other arithmetic: element-wise, reductions, normalizations, losses, optimizers."""

from flopmeter.costs.arithmetic import (  # noqa: F401  (they fill RULES)
    composed,
    fake_quantize,
    losses,
    normalization,
    optimizer,
    pointwise,
    reduction,
    resampling,
    softmax,
)
