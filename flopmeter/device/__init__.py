"""Devices: profiles and their schema, power, clusters of devices and NCCL's algorithms on their links."""
