"""Kernels that are registered for meta tensors, so that each op does on meta what it does on CUDA."""
