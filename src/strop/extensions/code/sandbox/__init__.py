"""Run programs that a model wrote, apart from the host, the network and each other."""
