"""Section ``policy``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, subsection
from strop.generation.generation_config import GenerationConfig
from strop.learner.learner_config import TORCH, LearnerName, policy_extensions
from strop.learner.model_config import ModelConfig
from strop.models.routing.router_config import RouterReplayConfig
from strop.problems import Problem


class ReferenceConfig(BaseConfig):
    """The frozen copy of the policy in the KL term."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    offload: bool = Field(False, description="Keep it in CPU memory between uses.")


class PolicyConfig(ModelConfig):
    """The policy and its training."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("generation_batch_size", "offload")

    backend: LearnerName = Field(
        "auto",
        description="Learner of all models of the run: torch, also for recipes that ask for another; that of an extension; "
        "auto is the one whose section is enabled.",
    )
    generation_batch_size: int | None = Field(
        None,
        ge=1,
        description="Accepted for NeMo-RL recipes, without effect: the engine batches continuously, up to "
        "generation.torch_cfg.max_num_seqs (rollouts).",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code contained in the run's models and tokenizers. It runs with your permissions: read it first.",
    )
    offload: bool | Literal["auto"] = Field(
        "auto",
        description="Move the learner (weights, gradients, optimizer state) and its frozen models to CPU memory while an engine samples "
        "on the same device; auto does so on GPUs. With the torch engine in the learner's process, only true does, and the policy's "
        "weights stay.",
    )
    deterministic: bool = Field(
        False,
        description="Make two equal runs equal to the last bit on GPUs: torch's deterministic algorithms with flash attention's backward "
        "pass, a fixed cuBLAS workspace, NCCL without additions in the switch, the deterministic modes of other learners, and vLLM's "
        "batch-invariant kernels. Slower (checkpoints). A CPU repeats without it.",
    )
    reference: ReferenceConfig = subsection(ReferenceConfig)
    router_replay: RouterReplayConfig = subsection(RouterReplayConfig)
    generation: GenerationConfig = subsection(GenerationConfig)

    @property
    def sends_draft(self) -> bool:
        """Whether engines are sent the draft head that is trained, and draft with it."""
        trained = any(each.trains_draft for each in policy_extensions(self))
        return trained and self.generation.uses_vllm and self.generation.vllm_cfg.speculation.method == "eagle3"

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield from self._check_backend(key)
        yield from self._check_adapter_dropout(key)
        yield from self._check_engine_length(f"{key}.generation")
        yield from self._check_router_replay(key)
        yield from self._check_indexer_replay(key)
        yield from self._check_compile(key)
        if self.deterministic:
            yield from self._check_deterministic(key)
            yield from self._check_deterministic_engine(key)

    def _check_backend(self, key: str) -> Iterator[Problem]:
        for name, section in self.learner_sections.items():
            if name != TORCH and self.backend != "auto" and section.enabled != (self.backend == section.backend):
                yield Problem(
                    f"{key}.{name}.enabled",
                    f"found {str(section.enabled).lower()}, but {key}.backend is {self.backend}",
                    f"Set it to {str(not section.enabled).lower()}, or {key}.backend=auto.",
                )

    def _check_adapter_dropout(self, key: str) -> Iterator[Problem]:
        for name, section in self.learner_sections.items():
            lora = section.adapters
            if name in (TORCH, self.learner_key) and lora.enabled and lora.dropout:
                yield Problem(
                    f"{key}.{name}.{section.adapters_key}.dropout",
                    f"found {lora.dropout}, but rollouts are sampled without dropout, so the trained policy would differ from the one that "
                    "sampled, with other masks at every step",
                    "Set it to 0; adapter dropout is for recorded data (strop sft, dpo and rm).",
                )

    def _check_engine_length(self, key: str) -> Iterator[Problem]:
        length, total = self.generation.engine_options.max_model_len, self.max_total_sequence_length
        if self.generation.uses_engines and length < total:
            yield Problem(
                f"{key}.{self.generation.engine_key}.{self.generation.engine_options.length_key}",
                f"found {length}, but a rollout may have policy.max_total_sequence_length = {total} tokens, and the engine would truncate "
                "it earlier",
                f"Leave it unset, set it to {total} or more, or lower policy.max_total_sequence_length.",
            )

    def _check_indexer_replay(self, key: str) -> Iterator[Problem]:
        if self.router_replay.indexers and self.generation.uses_engines:
            yield Problem(
                f"{key}.router_replay.indexers",
                f"found true, but {self.generation.engine_name} does not report the tokens that indexers chose",
                f"Set {key}.generation.backend=torch, or {key}.router_replay.indexers=false.",
            )
        if self.router_replay.indexers and not self.uses_torch:
            yield Problem(
                f"{key}.router_replay.indexers",
                "found true, but only the torch learner replays the tokens that indexers chose",
                f"Set {key}.backend=torch, or {key}.router_replay.indexers=false.",
            )

    def _check_router_replay(self, key: str) -> Iterator[Problem]:
        if not self.router_replay.enabled or not self.generation.uses_engines:
            return
        if not self.generation.uses_vllm:
            yield Problem(
                f"{key}.router_replay.enabled",
                f"found true, but {self.generation.engine_name} does not report the experts of tokens",
                f"Set {key}.generation.backend to torch or vllm, or {key}.router_replay.enabled=false.",
            )
            return
        if self.device == "cpu":
            yield Problem(
                f"{key}.router_replay.enabled",
                "found true, but vLLM reports the experts of tokens only with its model runner V2, which does not run on a CPU",
                f"Set {key}.generation.backend=torch, or {key}.router_replay.enabled=false.",
            )
        if (stages := self.generation.vllm_cfg.pipeline_parallel_size) > 1:
            yield Problem(
                f"{key}.router_replay.enabled",
                f"found true, but vLLM does not report the experts of tokens with {stages} pipeline stages",
                f"Set {key}.generation.vllm_cfg.pipeline_parallel_size=1, and tensor_parallel_size for a model that needs several GPUs.",
            )

    def _check_compile(self, key: str) -> Iterator[Problem]:
        """Yield settings that are incompatible with compiled layers; model and machine are checked on loading."""
        if self.compile is True and self.uses_torch and self.router_replay.enabled:
            yield Problem(
                f"{key}.compile",
                f"found true, but {key}.router_replay.enabled passes recorded experts to the layers, which compiled layers do not accept",
                f"Set it to auto or false, or {key}.router_replay.enabled=false.",
            )

    def _check_deterministic(self, key: str) -> Iterator[Problem]:
        """Yield settings that would let two equal runs differ."""
        if self.batching.train_mb_tokens == "auto":
            yield Problem(
                f"{key}.{self.batching_key}.train_mb_tokens",
                f"found auto, but {key}.deterministic is true, and a measured budget may cut a batch differently in another run",
                f"Set it to the number of tokens measured by a run, or {key}.deterministic=false.",
            )

    def _check_deterministic_engine(self, key: str) -> Iterator[Problem]:
        if self.generation.uses_vllm and self.device == "cpu":
            yield Problem(
                f"{key}.deterministic",
                "found true, but vLLM's batch-invariant mode exists only on GPUs; on a CPU the last bits of a token depend on the batch",
                f"Set {key}.generation.backend=torch, or {key}.deterministic=false.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        yield from super().warnings(key)
        yield from self._warn_unused_batch_size(key)
        if self.fp8.enabled and self.generation.uses_engines:
            found = "the learner multiplies in FP8, and the engine in its own precision"
            yield Problem(f"{key}.fp8.enabled", found, fix_other_rounding(key))
        if self.offload is True and not self.generation.colocated.enabled:
            yield Problem(f"{key}.offload", "it has no effect: the engine has its own devices")
        if self.router_replay.enabled and self.generation.uses_vllm and not self.generation.vllm_cfg.enable_prefix_caching:
            yield Problem(
                f"{key}.generation.vllm_cfg.enable_prefix_caching",
                f"found false, but vLLM stores the experts of tokens with its prefix cache, which {key}.router_replay.enabled turns on",
            )
        yield from self._warn_unused_sleep(f"{key}.generation.vllm_cfg.sleep_level")

    def _warn_unused_batch_size(self, key: str) -> Iterator[Problem]:
        if self.generation_batch_size is not None:
            yield Problem(
                f"{key}.generation_batch_size",
                "it has no effect: the engine batches continuously",
                "policy.generation.torch_cfg.max_num_seqs limits how many sequences run together.",
            )

    def _warn_unused_sleep(self, key: str) -> Iterator[Problem]:
        if self.generation.uses_vllm and self.generation.vllm_cfg.sleep_level == 1:
            if not self.generation.colocated.enabled:
                yield Problem(key, "it has no effect: an engine with its own device never sleeps")
            elif self.device == "cpu":
                yield Problem(key, "it has no effect: an engine on a CPU frees no memory")


def fix_other_rounding(key: str) -> str:
    """Return what to do about an engine that does not round as the learner does."""
    return (
        "loss_fn.use_importance_sampling_correction=true corrects it, and train/token_mult_prob_error measures it; "
        f"{key}.generation.backend=torch samples with the learner's rounding."
    )
