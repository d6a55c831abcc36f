"""The Megatron Core learner: tensor, pipeline, context and expert parallelism for models beyond the memory of one node."""
