"""Section ``policy.draft``: a draft head that is trained alongside the policy, and keys of ``torch_cfg`` about its drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from strop.base_config import PathText
from strop.generation.torch.speculation import Drafter, DraftingConfig, StateFuser
from strop.learner.learner_config import Measure, PolicyExtension
from strop.problems import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from strop.config.schema.policy_config import PolicyConfig
    from strop.extensions.labs.draft.eagle_head import EagleHead
    from strop.learner.torch.companion import Companion, CompanionOptions
    from strop.models.network import Network


log = logging.getLogger(__name__)


class HeadDraftingConfig(DraftingConfig):
    """How many tokens the policy's head proposes in the embedded engine, and how they are verified."""

    speculative_draft: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of tokens proposed by the policy's draft head (policy.draft) per step; 0 turns it off (tokens).",
    )
    speculative_sampling: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="How drafts of speculative_draft are verified. coupled: draft and token are drawn with the same random number, so "
        "the rollouts do not depend on the head; rejection keeps more drafts, but the drawn tokens depend on the head. Both are exact.",
    )

    def make_fuser(self, network: Network) -> StateFuser | None:
        if not self.speculative_draft or network.draft is None:
            return super().make_fuser(network)
        from strop.extensions.labs.draft.eagle_head import EagleFuser

        return EagleFuser(network)

    def make_drafter(self, network: Network, runner: Any) -> Drafter | None:
        """Create the drafter that uses the policy's head; None if there is none, with a warning if one was configured."""
        if not self.speculative_draft or network.draft is None:
            return super().make_drafter(network, runner)
        from strop.extensions.labs.draft.eagle_drafter import EagleDrafter
        from strop.generation.torch.paged.paged_runner import PagedRunner

        if isinstance(runner, PagedRunner) and runner.images is None:
            return EagleDrafter(network, runner, self.speculative_draft, rejection=self.speculative_sampling == "rejection")
        reason = (
            "needs a paged cache, which this engine does not have"
            if runner.images is None
            else "reads text, and this model images too"
        )
        log.warning("torch_cfg.speculative_draft %s: it decodes one token at a time", reason)
        return None


LayerIndices = Annotated[tuple[int, ...], Field(strict=False)]


class DraftConfig(PolicyExtension):
    """An EAGLE-3 head (arXiv 2503.01840) that learns to predict the policy's tokens from its hidden states."""

    identity_keys: ClassVar[tuple[str, ...]] = ("enabled", "model_name", "num_layers", "aux_layer_indices")

    enabled: bool = Field(False, description="Train a draft head alongside the policy, for speculative decoding.")
    model_name: PathText | None = Field(
        None,
        description="A hub name or folder with an EAGLE-3 head of this policy; null starts a new one, of the policy's shape.",
    )
    loss_weight: float = Field(1.0, gt=0, description="Factor of the head's loss. The policy's gradient does not depend on it.")
    num_layers: int | None = Field(
        None, ge=1, le=8, description="Layers of a new head; null is 1, and with model_name what the checkpoint has (layers)."
    )
    aux_layer_indices: LayerIndices | None = Field(
        None,
        description="Layers of the policy, from 0, whose outputs the head reads; null is the checkpoint's, else layer 1, the middle one "
        "and the fourth from the end.",
    )
    head_lr: float | None = Field(None, gt=0, description="Learning rate of the head; null is that of the policy's optimizer.")

    @property
    def trains_draft(self) -> bool:
        return self.enabled

    def errors(self, key: str) -> Iterator[Problem]:
        indices = self.aux_layer_indices
        if indices is not None and (not indices or list(indices) != sorted({*indices}) or indices[0] < 0):
            yield Problem(
                f"{key}.aux_layer_indices",
                f"found {list(indices)}: the head reads one or more layers, in the order of the model and each once",
                "Set it to null, or to a list such as [1, 13, 24].",
            )

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        """Yield settings that are incompatible with training a draft head; the model is checked on loading."""
        from strop.config.schema.run_config import RolloutRunConfig

        policy: PolicyConfig = config.policy
        yield from self._check_torch_engine(policy)
        yield from self._check_vllm(policy)
        if not self.enabled:
            return
        yield from self._check_learner(key, policy)
        yield from self._check_devices(key, config)
        if policy.generation.uses_extension and isinstance(config, RolloutRunConfig):
            yield Problem(
                f"{key}.enabled",
                f"found true, but a head that is trained is not sent to {policy.generation.engine_name}'s engines",
                f"Set policy.generation.backend to vllm or torch, or {key}.enabled=false.",
            )
        if config.trains_scores:
            yield Problem(
                f"{key}.enabled", "found true, but a reward model does not predict tokens for a head to draft", "Set it to false."
            )

    def _check_torch_engine(self, policy: PolicyConfig) -> Iterator[Problem]:
        engine, key = policy.generation.torch_cfg, "policy.generation.torch_cfg"
        count = HeadDraftingConfig.of(engine).speculative_draft
        if count and not self.enabled:
            yield Problem(
                f"{key}.speculative_draft",
                f"found {count}, but policy.draft.enabled is false, so there is no head that proposes tokens",
                "Set it to 0, or policy.draft.enabled=true; speculative_lookup proposes tokens without a head.",
            )
        if count and engine.speculative_lookup:
            yield Problem(
                f"{key}.speculative_lookup",
                f"found {engine.speculative_lookup}, and speculative_draft is {count}: one of them proposes tokens",
                "Set one of them to 0.",
            )
        if self.enabled and count and policy.learner.needs_ranks and not policy.generation.uses_vllm:
            yield Problem(
                f"{key}.speculative_draft",
                f"found {count}, but with {policy.learner.title} the torch engine is in a separate process, which is not sent the head",
                "Set it to 0, or policy.generation.backend=vllm with vllm_cfg.speculation.method=eagle3.",
            )

    def _check_vllm(self, policy: PolicyConfig) -> Iterator[Problem]:
        """Yield a head that vLLM would not find, or not receive."""
        drafts, key = policy.generation.vllm_cfg.speculation, "policy.generation.vllm_cfg.speculation"
        if drafts.method != "eagle3" or not policy.generation.uses_vllm:
            return
        if not self.enabled:
            if drafts.model_name is None:
                yield Problem(
                    f"{key}.model_name",
                    f"it is not set, but {key}.method is eagle3 and no head is trained (policy.draft.enabled is false)",
                    "Set it to the folder or hub name of a head, or policy.draft.enabled=true.",
                )
            return
        if drafts.model_name not in (None, self.model_name):
            yield Problem(
                f"{key}.model_name",
                f"found {drafts.model_name}, but the engine drafts with the head that is trained, policy.draft.model_name = "
                f"{self.model_name}",
                "Remove it.",
            )
        if (precision := policy.generation.vllm_cfg.precision) not in ("bfloat16", "float32"):
            yield Problem(
                "policy.generation.vllm_cfg.precision",
                f"found {precision}, but the draft head is sent with the policy's weights, and its own are not rounded",
                "Set it to bfloat16, or policy.draft.enabled=false.",
            )
        if policy.adapter_rank is not None and policy.generation.weight_sync.adapters_alone:
            yield Problem(
                "policy.generation.weight_sync.adapters_alone",
                "found true, but the draft head is sent with the policy's whole weights",
                "Set it to false, or policy.draft.enabled=false.",
            )

    def _check_learner(self, key: str, policy: PolicyConfig) -> Iterator[Problem]:
        if not policy.sequence_packing.enabled and policy.uses_torch:
            yield Problem(
                "policy.sequence_packing.enabled",
                f"found false, but {key}.enabled is true: the head reads packed rows of hidden states",
                f"Set it to true, or {key}.enabled=false.",
            )
        if policy.compile is True:
            yield Problem(
                "policy.compile",
                f"found true, but {key}.enabled is true: the head reads the states between layers, which compiled ones may not show",
                f"Set it to auto, or {key}.enabled=false.",
            )

    def _check_devices(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.config.cluster_checks import count_devices

        policy: PolicyConfig = config.policy
        section, shards = f"policy.{policy.learner_key}", policy.learner.largest_size
        if shards > 1:
            yield Problem(
                f"{key}.enabled",
                f"found true, but {section} cuts the policy over {shards} devices, and a head is trained alongside a whole policy in this "
                "version",
                f"Set it to false, or the tensor, context and pipeline sizes of {section} to 1.",
            )
        elif count_devices(config).uses_ray and not policy.learner.trains_drafts:
            able = {name: each for name, each in policy.learner_sections.items() if each.trains_drafts}
            beside = " or ".join(each.title for each in able.values())
            yield Problem(
                f"{key}.enabled",
                "found true, but the models of the run are in a cluster of processes (cluster), where "
                f"{f'a head is trained only alongside {beside}' if able else 'no head is trained'}",
                "Leave one process with one device (cluster.num_nodes=1, cluster.gpus_per_node=1), "
                f"{''.join(f'set policy.{name}.enabled=true, ' for name in able)}or this to false.",
            )

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.config.schema.run_config import RolloutRunConfig

        if not self.enabled or not isinstance(config, RolloutRunConfig) or config.policy.generation.uses_extension:
            return
        engine = config.policy.generation
        drafts = HeadDraftingConfig.of(engine.torch_cfg).speculative_draft > 0
        if not (engine.vllm_cfg.speculation.method == "eagle3" if engine.uses_vllm else drafts):
            option = "vllm_cfg.speculation.method=eagle3" if engine.uses_vllm else "torch_cfg.speculative_draft=3"
            yield Problem(
                f"{key}.enabled",
                "the head is trained, but no engine of this run drafts with it",
                f"policy.generation.{option} does.",
            )

    def change_policy(self, network: Network, tokenizer: Any, measure: Measure, seed: int) -> None:
        if not self.enabled:
            return
        if network.vision is not None:
            raise ValueError(
                f"policy.draft.enabled is true, and {type(network.model).__name__} reads images, which a draft head would read as "
                "the embedding of their tokens; set it to false"
            )
        network.draft = self.make_head(network.head.weight, network.model.config, seed)

    def make_head(self, policy_head: Tensor, hf_config: Any, seed: int) -> EagleHead:
        """Load the draft head of a policy, or make a new one; ``seed`` initializes it. ``policy_head`` [V, H]: the policy's output layer.

        Raises ModelNotFound, ValueError.
        """
        from strop.extensions.labs.draft.eagle_config import new_shape
        from strop.extensions.labs.draft.eagle_head import EagleHead, find_head_folder, load_head

        text = hf_config.get_text_config()
        if self.model_name is None:
            head = EagleHead(new_shape(text, layers=self.num_layers, aux_layers=self.aux_layer_indices))
            head.initialize(policy_head, seed)
        else:
            head = load_head(find_head_folder(self.model_name), int(text.num_hidden_layers), policy_head)
        weights = sum(parameter.numel() for parameter in head.parameters())
        log.info("draft head: %s parameters, it reads layers %s of the policy", f"{weights:,}", head.shape.aux_layers)
        return head.to(policy_head.device)

    def make_companion(self, network: Network, options: CompanionOptions) -> Companion | None:
        from strop.extensions.labs.draft.draft_trainer import DraftOptions, DraftTrainer
        from strop.extensions.labs.draft.eagle_head import EagleHead

        if not isinstance(network.draft, EagleHead):
            return None
        section = options.section
        if options.on_ranks:
            raise ValueError(
                f"{section}.draft.enabled: found true, but the learner is on several ranks, which cannot train a head in this version. "
                "Train on one device, or set it to false"
            )
        if not network.packed:
            raise ValueError(
                f"{section}.draft: the head reads the packed rows of the policy, and {type(network.model).__name__} reads padded ones "
                f"({network.fallback or 'sequence packing is off'}); set {section}.draft.enabled=false"
            )
        given = options.optimizer.kwargs
        kwargs = dict(given) if self.head_lr is None else {**given, "lr": self.head_lr}
        trained = DraftOptions(
            # The policy's optimizer without its patterns of names.
            optimizer=replace(options.optimizer, kwargs=kwargs, groups=(), no_decay=()),
            max_grad_norm=options.max_grad_norm,
            loss_weight=self.loss_weight,
            scheduler=options.scheduler,
            schedule_unit=options.schedule_unit,
            schedule_length=options.schedule_length,
            section=section,
        )
        return DraftTrainer(network, network.draft, trained, options.sampling)
