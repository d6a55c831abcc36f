"""Hugging Face models, as the learner and the PyTorch engine run them."""

from strop.models.quantization.import_messages import hide_import_messages
from strop.models.vision.torchvision_hook import install_hook

install_hook()
hide_import_messages()
