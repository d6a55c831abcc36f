"""Monitoring of a run's machines: GPUs, processors, memory, disk and network."""
