"""The key ``policy.exact_on_policy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from strop.generation.generation_config import UnusedGenerationConfig
from strop.learner.learner_config import Measure, PolicyExtension
from strop.problems import Problem

if TYPE_CHECKING:
    from strop.config.schema.policy_config import PolicyConfig
    from strop.models.network import Network


class ExactConfig(PolicyExtension):
    """Equal bits in learner and engine."""

    exact_on_policy: bool = Field(
        False,
        description="Compute a token's log-probability with the same bits in the engine and in the learner, in both precisions: "
        "products, attention, norms and activations in a fixed order of additions, independent of the token's neighbours. The ratio of "
        "an on-policy step is then exactly 1, which every step checks. Costs time (performance). For the torch engine in the learner's "
        "process.",
    )

    @property
    def fixes_order(self) -> bool:
        return self.exact_on_policy or super().fixes_order

    @property
    def _own_policy(self) -> PolicyConfig:
        """The section that this key stands in."""
        return cast("PolicyConfig", self)

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        policy = self._own_policy
        if not self.exact_on_policy:
            return
        if not isinstance(policy.generation, UnusedGenerationConfig):
            if policy.compile is True and policy.uses_torch:
                yield Problem(
                    f"{key}.compile",
                    f"found true, but {key}.exact_on_policy computes with operations of a fixed order, and a compiler chooses its own",
                    f"Set it to auto or false, or {key}.exact_on_policy=false.",
                )
            yield from self._check_exact_engine(key)
        if policy.fp8.enabled:
            yield Problem(
                f"{key}.exact_on_policy",
                f"found true, but with {key}.fp8.enabled layers multiply in FP8, which has no exact form",
                f"Set it to false, or {key}.fp8.enabled=false.",
            )

    def _check_exact_engine(self, key: str) -> Iterator[Problem]:
        """Yield settings that are incompatible with bit-identical results in learner and engine."""
        policy = self._own_policy
        generation = policy.generation
        if generation.uses_vllm and policy.device == "cpu":
            yield Problem(
                f"{key}.exact_on_policy",
                "found true, but vLLM's batch-invariant mode exists only on GPUs",
                f"Set {key}.generation.backend=torch, or {key}.exact_on_policy=false.",
            )
        if generation.uses_extension:
            yield Problem(
                f"{key}.exact_on_policy",
                f"found true, but {generation.engine_name}'s agreement with the learner to the last bit has not been tried",
                f"Set {key}.generation.backend=torch, or {key}.exact_on_policy=false.",
            )
        if not policy.sequence_packing.enabled:
            yield Problem(
                f"{key}.sequence_packing.enabled",
                "found false, but policy.exact_on_policy reads packed rows: padded ones have no fixed order of additions",
                f"Set it to true, or {key}.exact_on_policy=false.",
            )
        if generation.keep_sampling_mask:
            yield Problem(
                f"{key}.generation.keep_sampling_mask",
                "found true, but with policy.exact_on_policy the filters keep the same tokens on both sides without a record of them",
                f"Set it to false, or {key}.exact_on_policy=false.",
            )
        if policy.dtensor_cfg.largest_size > 1:
            yield Problem(
                f"{key}.exact_on_policy",
                "found true, but tensor-, context-, pipeline- or expert-parallel ranks add in a different order",
                f"Set it to false, or these sizes of {key}.dtensor_cfg to 1.",
            )

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        """Shapes are compared in the process that computes with them, but those of sharded weights never are."""
        from strop.config.cluster_checks import count_devices
        from strop.config.schema.run_config import RolloutRunConfig

        yield from super().errors_of_run(key, config)
        if self.exact_on_policy and isinstance(config, RolloutRunConfig) and count_devices(config).uses_ray:
            yield Problem(
                f"{key}.exact_on_policy",
                "found true, but the learner of this run is in separate processes (Ray), and only a learner and engine in one process are "
                "known to agree to the last bit",
                f"Set cluster.backend=local on one device, or {key}.exact_on_policy=false.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        yield from super().warnings(key)
        if not self.exact_on_policy:
            return
        if isinstance(self._own_policy.generation, UnusedGenerationConfig):
            yield Problem(f"{key}.exact_on_policy", "it has no effect: recorded data has no engine")
        elif self._own_policy.generation.uses_vllm:
            yield Problem(
                f"{key}.exact_on_policy",
                "vLLM samples in its batch-invariant mode (VLLM_BATCH_INVARIANT=1), whose agreement with the learner to the last bit is "
                "unchecked: train/token_mult_prob_error measures the remaining difference",
            )

    def network_checks(self) -> Mapping[str, Callable[[Network], object]]:
        if not self._is_exact:
            return super().network_checks()
        from strop.extensions.labs.exact.exact_passes import check_layers

        return {**super().network_checks(), "exact_on_policy": check_layers}

    @property
    def _is_exact(self) -> bool:
        return self.exact_on_policy and not isinstance(self._own_policy.generation, UnusedGenerationConfig)

    def change_policy(self, network: Network, tokenizer: Any, measure: Measure, seed: int) -> None:
        if self._is_exact:
            from strop.extensions.labs.exact.exact_passes import make_network_exact

            make_network_exact(network)
        super().change_policy(network, tokenizer, measure, seed)
