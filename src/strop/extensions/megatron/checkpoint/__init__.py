"""Checkpoints of the Megatron Core learner: folders that Megatron Core's own ``dist_checkpointing`` reads."""
