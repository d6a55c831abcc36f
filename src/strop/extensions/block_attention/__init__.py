"""Attention to blocks of tokens, in families of Transformers that choose or pool blocks each in its own way."""
