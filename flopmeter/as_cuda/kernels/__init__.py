"""Kernels that are registered for meta tensors, so that one op of theirs does what the op does on CUDA."""
