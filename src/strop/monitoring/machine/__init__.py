"""What the machines of a run do: GPUs, processors, memory, disk and network."""
