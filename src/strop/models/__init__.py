"""Hugging Face models, as the learner and the PyTorch engine run them."""

from strop.models.vision.torchvision_hook import install_hook

install_hook()
