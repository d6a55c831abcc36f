"""Names of tensors in SGLang's models that read images: those of the hub's files, and Strop sends those of Transformers."""

from __future__ import annotations

from typing import Any

PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


def engine_name(model: Any, name: str) -> str:
    """Return the name under which a model of SGLang has a tensor."""
    if not hasattr(model, "visual"):
        return name
    for sent, held in PREFIXES:
        if name.startswith(sent):
            return held + name.removeprefix(sent)
    return name
