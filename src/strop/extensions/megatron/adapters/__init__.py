"""Low-rank adapters of a model's stages: which layers have them, their weights under the names of PEFT's files, and such files."""
