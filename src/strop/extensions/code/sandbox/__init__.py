"""Run programs that a model wrote, isolated from the host, the network and each other."""
