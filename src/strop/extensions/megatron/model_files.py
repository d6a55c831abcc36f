"""A Hugging Face model on disk, which ranks read their shards from: nothing of it is in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop.models.classifiers import to_classifier_config
from strop.models.export import load_model_config
from strop.models.loading import apply_overrides, find_model_folder, find_stop_token_ids, load_generation_config


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """The folder of a model's safetensors, and its configuration."""

    name: str  # as it is configured
    folder: Path
    config: Any  # of Transformers

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def stop_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Return the ids that end a turn, those of the loaded model."""
        model = SimpleNamespace(config=self.config, generation_config=load_generation_config(self.folder))
        return find_stop_token_ids(model, tokenizer)

    def become_classifier(self) -> None:
        """Change the configuration to that of a classifier with one label: a reward model or a critic. Raises ValueError."""
        to_classifier_config(self.name, self.config)

    def fingerprint(self, *, samples: int = 1024) -> str:
        """Return a hash of the weights: names, shapes and the first ``samples`` entries of each."""
        from safetensors import safe_open

        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
                for name in sorted(file.keys()):
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    digest.update(f"{name} {shape} ".encode())
                    if shape and 0 not in shape:
                        digest.update(part[:1].flatten()[:samples].float().numpy().tobytes())
        return digest.hexdigest()


def find_model_files(name: str, overrides: dict[str, Any]) -> ModelFiles:
    """Find a model by its folder or hub name. ``overrides`` change its configuration. Raises ModelNotFound, ValueError."""
    reason = "ranks of Megatron Core read their shards of safetensors"
    folder = find_model_folder(name, reason=reason, instead=", or set policy.backend=torch")
    return ModelFiles(name, folder, apply_overrides(load_model_config(str(folder)), overrides))
