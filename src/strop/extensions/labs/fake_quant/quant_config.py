"""Keys of ``policy`` about fake quantisation, which are NeMo-RL's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, field_validator

from strop.base_config import NAMES_FILE
from strop.extensions.labs.fake_quant.modelopt_config import QuantConfigError, read_quant_config
from strop.generation.generation_config import UnusedGenerationConfig
from strop.learner.learner_config import Measure, PolicyExtension
from strop.problems import Problem

if TYPE_CHECKING:
    from strop.config.schema.policy_config import PolicyConfig
    from strop.models.network import Network

log = logging.getLogger(__name__)


class QuantConfig(PolicyExtension):
    """Fake quantisation of the policy (quantisation-aware training): ``quant_cfg`` and the calibration of its scales."""

    identity_keys: ClassVar[tuple[str, ...]] = ("quant_cfg", "quant_calib_data", "quant_calib_size", "quant_sequence_length")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("quant_batch_size",)

    quant_cfg: str | None = Field(
        None,
        json_schema_extra=NAMES_FILE,
        description="Train with rounded weights and inputs of linear layers, and sample with the same: a configuration of ModelOpt "
        "(NVFP4_DEFAULT_CFG, FP8_DEFAULT_CFG, ...) or a YAML file in the form of its recipes; null rounds nothing (fp8).",
    )
    quant_calib_data: str | None = Field(
        None,
        description="Texts that find the scales of inputs before training, where quant_cfg has scales of whole tensors: cnn_dailymail or "
        "another data set of the hub, a file of texts (.txt, .jsonl), or random (tokens).",
    )
    quant_calib_size: int = Field(512, ge=1, description="Texts of quant_calib_data that are read (texts).")
    quant_batch_size: int = Field(32, ge=1, description="Texts of a forward pass of the calibration (texts).")
    quant_sequence_length: int = Field(1024, ge=2, description="Tokens that are read of each text of the calibration (tokens).")

    @field_validator("quant_cfg")
    @classmethod
    def _resolve_file(cls, value: str | None) -> str | None:
        """Make the path of a file absolute: ranks may have another working directory."""
        path = None if value is None else Path(value).expanduser()
        return value if path is None or not path.is_file() else str(path.resolve())

    @property
    def _policy(self) -> PolicyConfig:
        """The section that these keys stand in."""
        return cast("PolicyConfig", self)

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        if self.quant_cfg is None:
            return
        yield from self._check_calibration(key)
        yield from self._check_rounded_learner(key)
        if not isinstance(self._policy.generation, UnusedGenerationConfig):
            yield from self._check_rounded_engine(key)

    def _check_calibration(self, key: str) -> Iterator[Problem]:
        try:
            rules = read_quant_config(str(self.quant_cfg))
        except QuantConfigError as error:
            yield Problem(f"{key}.quant_cfg", str(error), error.fix)
            return
        if rules.may_calibrate and self.quant_calib_data is None:
            yield Problem(
                f"{key}.quant_calib_data",
                f"found null, but {self.quant_cfg} rounds inputs with scales of whole tensors, which texts must find before training: a "
                "scale of each micro-batch would change the gradient with how a batch is cut",
                f"Set it to cnn_dailymail, a file of texts, or random; or {key}.quant_cfg to a configuration with scales of tokens or "
                "blocks, or of weights only.",
            )

    def _check_rounded_learner(self, key: str) -> Iterator[Problem]:
        """Yield settings of the learner that are incompatible with rounded weights and inputs."""
        policy = self._policy
        if policy.fp8.enabled:
            yield Problem(
                f"{key}.fp8.enabled",
                f"found true, but {key}.quant_cfg is {self.quant_cfg}, and a layer rounds in one way",
                f"Set it to false, or {key}.quant_cfg=null.",
            )
        for name, found, reason, fix in (
            ("backend", not policy.uses_torch, "Megatron Core's layers use unrounded weights", "torch"),
            ("compile", policy.compile is True, "a compiled layer would use unrounded weights", "auto"),
        ):  # fmt: skip
            if found:
                yield Problem(
                    f"{key}.quant_cfg",
                    f"found {self.quant_cfg}, but {reason}",
                    f"Set {key}.{name}={fix}, or {key}.quant_cfg=null.",
                )

    def _check_rounded_engine(self, key: str) -> Iterator[Problem]:
        """Yield settings of the engine that are incompatible with rounded weights and inputs."""
        policy = self._policy
        yield from self._check_one_format(key, policy.generation.weight_format)
        adapters = policy.dtensor_cfg.lora_cfg.enabled and policy.generation.uses_engines
        if adapters and not policy.generation.weight_sync.adapters_alone:
            yield Problem(
                f"{key}.generation.weight_sync.adapters_alone",
                f"found false, but with {key}.quant_cfg adapters are added to rounded weights, while merged weights are rounded "
                "differently",
                f"Set it to true, or {key}.quant_cfg=null.",
            )
        if self.fixes_order:
            yield Problem(
                f"{key}.exact_on_policy",
                f"found true, but with {key}.quant_cfg weights and inputs are rounded in passes that have no exact form",
                f"Set it to false, or {key}.quant_cfg=null.",
            )

    def _check_one_format(self, key: str, engine: str | None) -> Iterator[Problem]:
        """An engine that rounds the weights itself must round like the learner."""
        if engine is None:
            return
        with suppress(QuantConfigError):  # reported above
            learner = read_quant_config(str(self.quant_cfg)).weight_format("model.layers.1.mlp.down_proj")
            if learner is None or learner.name != engine:
                yield Problem(
                    f"{key}.quant_cfg",
                    f"{self.quant_cfg} rounds weights to {'nothing' if learner is None else learner.name}, and the engine rounds them to "
                    f"{engine}, so it would not sample from the trained policy",
                    f"Set it to a configuration with {engine} weights, or to null; or leave the engine's precision alone, which then has "
                    "the learner's.",
                )

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.config.schema.run_config import RolloutRunConfig

        yield from super().errors_of_run(key, config)
        if self.quant_cfg is not None and config.trains_scores:
            yield Problem(
                f"{key}.quant_cfg", f"found {self.quant_cfg}, but a reward model uses unrounded weights", "Set it to null."
            )
        if isinstance(config, RolloutRunConfig):
            yield from self._check_merged_adapters(key, config)

    def _check_merged_adapters(self, key: str, config: Any) -> Iterator[Problem]:
        """Torch engines in other processes merge adapters, and would then also round the adapters' inputs."""
        from strop.config.cluster_checks import count_devices

        policy = self._policy
        if not policy.dtensor_cfg.lora_cfg.enabled or policy.generation.uses_engines:
            return
        with suppress(QuantConfigError):  # reported above
            if self.rounds_inputs and count_devices(config).uses_ray:
                yield Problem(
                    f"{key}.quant_cfg",
                    f"{self.quant_cfg} rounds inputs of layers with adapters, which read inputs as they are; torch engines in other "
                    "processes have the adapters merged, and would round what those read",
                    "Set it to a configuration that rounds only weights, or cluster.backend=local on one device; or train without adapters "
                    "(policy.dtensor_cfg.lora_cfg.enabled=false).",
                )

    def warnings(self, key: str) -> Iterator[Problem]:
        from strop.config.schema.policy_config import fix_other_rounding

        yield from super().warnings(key)
        generation = self._policy.generation
        if self.rounds_inputs and generation.uses_engines and generation.weight_format is None:
            yield Problem(
                f"{key}.quant_cfg",
                f"{self.quant_cfg} rounds inputs of layers, and {generation.backend} samples with rounded weights but with inputs as "
                "they are",
                fix_other_rounding(key),
            )

    @property
    def rounds_inputs(self) -> bool:
        """Whether quant_cfg rounds inputs of layers, not only weights."""
        return self.quant_cfg is not None and read_quant_config(self.quant_cfg).rounds_inputs

    def change_policy(self, network: Network, tokenizer: Any, measure: Measure, seed: int) -> None:
        super().change_policy(network, tokenizer, measure, seed)
        if self.quant_cfg is None:
            return
        from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant
        from strop.extensions.labs.fake_quant.calibration import (
            calibrate_inputs,
            needs_calibration,
            read_calibration_tokens,
            set_input_scales,
        )

        engine_rounds = self._policy.generation.weight_format is not None  # to the same format, as ``_check_one_format`` sees to
        summary = apply_fake_quant(network.model, read_quant_config(self.quant_cfg), sends_rounded=not engine_rounds)
        log.info("policy.quant_cfg: %s", summary)

        def find_scales() -> Mapping[str, float]:
            texts = read_calibration_tokens(
                str(self.quant_calib_data),
                size=self.quant_calib_size,
                length=self.quant_sequence_length,
                tokenizer=tokenizer,
                vocabulary=network.head.vocabulary,
            )
            return calibrate_inputs(network, texts, self.quant_batch_size)

        if needs_calibration(network.model):
            set_input_scales(network.model, measure(find_scales))

    def network_checks(self) -> Mapping[str, Callable[[Network], object]]:
        if self.quant_cfg is None:
            return super().network_checks()
        from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant

        rules = read_quant_config(self.quant_cfg)
        return {**super().network_checks(), "quant_cfg": lambda network: apply_fake_quant(network.model, rules)}

    def save_for_engines(self, network: Network, folder: Path) -> None:
        super().save_for_engines(network, folder)
        if self.quant_cfg is not None:
            from strop.extensions.labs.fake_quant.calibration import save_input_scales

            save_input_scales(network.model, folder)

    def change_engine_model(self, model: Any, folder: Path) -> None:
        super().change_engine_model(model, folder)
        if self.quant_cfg is not None and self._policy.generation.weight_format is None:  # weights arrive rounded
            from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant
            from strop.extensions.labs.fake_quant.calibration import load_input_scales

            apply_fake_quant(model, read_quant_config(self.quant_cfg), keeps_rounded=True)
            load_input_scales(model, folder)
