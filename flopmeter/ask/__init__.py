"""Questions that take more than one report: which device, which batch, how many GPUs, what if."""
