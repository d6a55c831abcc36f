"""Hugging Face models, as used by the learner and the PyTorch engine."""

from strop.models.import_hooks import hide_import_messages, install_hook

install_hook()
hide_import_messages()
