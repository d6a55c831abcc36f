"""One network over many ranks: data, tensor, sequence, context and expert parallelism, with one gradient for all of them."""
