"""What a rank knows of a policy that Megatron Core trains, before its stages are built: no weights, and nothing of Megatron Core."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop.config import TrainingRunConfig
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.extensions.megatron.cpu_shim import prepare_megatron
from strop.extensions.megatron.families.find_family import to_text_config
from strop.models.chat_template import ChatTemplate
from strop.models.checkpoint_names import load_model_config
from strop.models.loading import apply_overrides, find_model_folder, find_stop_token_ids, load_generation_config, load_tokenizer
from strop.models.value_network import choose_pad_token, to_classifier_config
from strop.runs.lifecycle import seed_everything
from strop.runs.models import TokenizerBundle, prepare_device, set_up_gpu, tokenizer_key


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
    config = apply_overrides(load_model_config(str(folder)), overrides)
    if (text := to_text_config(config)) is not config:
        warnings.warn(
            f"Megatron Core trains the language model of {name} alone: it is published, saved and exported as {text.architectures[0]}, "
            "without the vision tower. policy.backend=torch trains all of it",
            stacklevel=2,
        )
    return ModelFiles(name, folder, text)


@dataclass(eq=False)
class DraftSlot:
    """The draft head of a policy, once its stages are built."""

    head: EagleHead | None = None


@dataclass(frozen=True, eq=False)
class MegatronPolicy(TokenizerBundle):
    """The policy's tokenizer, and the files that its stages are read from."""

    files: ModelFiles
    vocab_size: int  # of the output layer; 0 for a reward model

    draft: DraftSlot = field(default_factory=lambda: DraftSlot())

    packed = True  # core attention follows the tree of any row
    fallback = None
    adapter_layers = ()  # Megatron Core's names are not the engines'

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def write_folder(self, folder: Path) -> None:
        """Write the folder that engines build the model from: configuration and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.files.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def write_draft(self, folder: Path) -> None:
        """Write the draft head as it is now, for engines that draft with it."""
        assert self.draft.head is not None
        self.draft.head.save(folder)


def load_megatron_policy(config: TrainingRunConfig) -> MegatronPolicy:
    """Find the policy's files and load its tokenizer. Raises ModelNotFound, ValueError."""
    seed_everything(config.training.seed)
    policy = config.policy
    set_up_gpu(config)
    prepare_megatron(prepare_device(policy.device, policy.num_threads).type)
    files = find_model_files(policy.model_name, policy.hf_config_overrides)
    tokenizer = load_tokenizer(policy.tokenizer.name, chat_template=policy.tokenizer.chat_template, key=tokenizer_key(policy))
    stop_ids = files.stop_ids(tokenizer)
    vocab_size = files.vocab_size
    if config.trains_scores:
        files.become_classifier()
        files.config.pad_token_id = choose_pad_token(tokenizer, stop_ids, vocab_size)
        vocab_size = 0
    template = ChatTemplate(tokenizer, options=policy.tokenizer.chat_template_kwargs)
    return MegatronPolicy(tokenizer, template, stop_ids, files, vocab_size)
