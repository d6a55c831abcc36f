"""Hugging Face models, as used by the learner and the PyTorch engine."""

from strop.models.quantization.import_messages import hide_import_messages
from strop.models.vision.torchvision_hook import install_hook

install_hook()
hide_import_messages()
