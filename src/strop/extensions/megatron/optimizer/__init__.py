"""Megatron Core's optimizer, its schedule and its gradient buffers, from the sections of ``megatron_cfg``."""
