"""Section ``generation`` (under ``policy``, or at the top of an evaluation): the inference engine and how it samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from strop import packages, plugins
from strop.base_config import BaseConfig, changed_keys, follows, subsection
from strop.generation.engine_config import AutoEngine, EngineConfig
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.vllm.vllm_config import MIN_TEMPERATURE, VllmConfig, describe_checked, unchecked_version
from strop.problems import Problem
from strop.sampling import Sampling
from strop.user_code import UserCodeError
from strop.weight_sync.weight_sync_config import WeightSyncConfig


def _check_top_k(value: int | None) -> int | None:
    if value is not None and value != -1 and value < 1:
        raise ValueError("top_k must be at least 1; null or -1 keeps every token")
    return value


TopK = Annotated[int | None, AfterValidator(_check_top_k)]


# Keys of vLLM's section that quantise rollouts, for any engine.
QUANTIZATION_KEYS = (
    "precision",
    "is_mx",
    "use_deep_gemm",
    "pow2_weight_scaling_factors",
    "pow2_activation_scaling_factors",
    "num_first_layers_in_bf16",
    "num_last_layers_in_bf16",
    "quantization_ignored_layer_kws",
    "kv_cache_dtype",
)


TopP = Annotated[float, Field(gt=0, le=1)]


Temperature = Annotated[float, Field(ge=0)]


TokenIds = Annotated[tuple[int, ...], Field(strict=False)]


Strings = Annotated[tuple[str, ...], Field(strict=False)]


if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("auto", "torch", "vllm", *sorted(plugins.declared("engines")))]


RolloutFormat = Literal["fp8_tensor", "fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8", "nvfp4"]

KERNEL_FORMATS: tuple[RolloutFormat, ...] = ("fp8_block", "fp8_block_pow2", "mxfp8")  # accepted by vLLM in a publish


class RolloutQuantizationConfig(BaseConfig):
    """Low-precision weights for rollouts, in the linear layers of the decoder."""

    format: RolloutFormat | None = Field(
        None,
        description="Number format of the engine's weights: fp8_tensor, fp8_row and fp8_block (128 x 128) are E4M3 with a float32 scale "
        "for each matrix, row or block, fp8_block_pow2 has powers of two as scales; mxfp8 (1 x 32) and nvfp4 (1 x 16). null follows "
        "vllm_cfg.precision: fp8_block for fp8, mxfp8 with is_mx.",
    )
    emulate: bool = Field(
        False,
        description="Round weights to the format and back, and compute in bfloat16 or float32, which needs no FP8 hardware and saves "
        "nothing. The torch engine also rounds the inputs of its layers and, with kv_cache_dtype=fp8, keys and values.",
    )
    send_quantized: bool = Field(
        False,
        description="Quantise weights once, on the learner, and send values and scales: half the bytes of a publish. false sends them in "
        "the engine's data type, and each engine quantises them. For vLLM's own FP8 layers.",
    )


class ColocatedResourcesConfig(BaseConfig):
    """Devices of generation when it is not colocated."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of each node that generate (GPUs).")
    num_nodes: int | None = Field(None, ge=1, description="Nodes that only generate (nodes).")


class ColocatedConfig(BaseConfig):
    """Whether generation and training share devices."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Generate on the devices that train.")
    resources: ColocatedResourcesConfig = subsection(ColocatedResourcesConfig)


class MismatchConfig(BaseConfig):
    """Limits on the mismatch between engine and learner: token_mult_prob_error of the newest tokens in a training step."""

    warn: float | None = Field(1.2, gt=1, description="Warn above this; null never warns (factor).")
    warn_every: int = Field(20, ge=1, description="Warn at most once in this many steps (steps).")
    stop: float | None = Field(2.0, gt=1, validate_default=True, description="End the run above this; null never does (factor).")
    stop_after: int = Field(10, ge=1, description="Steps in a row above stop that end the run (steps).")

    @field_validator("stop")
    @classmethod
    def _check_stop_above_warn(cls, value: float | None, info: ValidationInfo) -> float | None:
        warn = info.data.get("warn")
        if value is not None and warn is not None and value < warn:
            raise ValueError(f"it is below warn = {warn:g}, so the run would end without a warning; raise stop, or lower warn")
        return value


class GenerationConfig(BaseConfig):
    """The inference engine and how it samples."""

    backend: EngineName = Field(
        "auto",
        description="Inference engine: torch, built into Strop, or another one, in separate processes. auto is vllm where a GPU and "
        "vLLM are, unless it cannot do what is configured, and torch elsewhere; what it is, is said at the start.",
    )
    max_new_tokens: int = follows(
        "..max_total_sequence_length", standalone=512, ge=1, description="Longest completion of one turn (tokens)."
    )
    temperature: Temperature = Field(1.0, description="Sampling temperature; 0 is greedy.")
    top_p: TopP = Field(1.0, description="Sample from the smallest set of tokens with this probability; 1 turns it off.")
    top_k: TopK = Field(None, description="Sample from only the most likely tokens, this many; null or -1 turns it off (tokens).")
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample from tokens with at least this fraction of the most likely token's probability; 0 turns it off.",
    )
    keep_sampling_mask: bool = Field(
        False,
        description="Record which tokens top_k, top_p and min_p kept, and renormalise over them in the learner (arXiv 2512.02556), so "
        "that ratios do not jump where the learner would keep different tokens. Needs a top_k of at most 4096, and up to 4 x top_k bytes "
        "for each sampled token.",
    )
    val_temperature: Temperature = follows(".temperature", standalone=1.0, description="temperature in validation.")
    val_top_p: TopP = follows(".top_p", standalone=1.0, description="top_p in validation.")
    val_top_k: TopK = follows(
        ".top_k", standalone=None, description="top_k in validation; -1 turns it off, regardless of top_k (tokens)."
    )
    stop_token_ids: TokenIds | None = Field(None, description="Token ids that end a completion, besides the model's own.")
    stop_strings: Strings | None = Field(None, description="Texts that end a completion.")
    mismatch: MismatchConfig = subsection(MismatchConfig)
    torch_cfg: TorchGenerationConfig = subsection(TorchGenerationConfig)
    vllm_cfg: VllmConfig = subsection(VllmConfig)
    quantization: RolloutQuantizationConfig = subsection(RolloutQuantizationConfig)
    vllm_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's engine, passed through; unknown ones are errors."
    )
    weight_sync: WeightSyncConfig = subsection(WeightSyncConfig)
    colocated: ColocatedConfig = subsection(ColocatedConfig)

    # The choice of backend=auto on this machine; None: torch, without a GPU. Set when a configuration is loaded; not saved, so
    # that a run may continue on other machines.
    auto_engine: AutoEngine | None = Field(None, exclude=True, repr=False)

    @field_validator("keep_sampling_mask")
    @classmethod
    def _require_top_k(cls, value: bool, info: ValidationInfo) -> bool:
        filters = info.data.get("top_p", 1.0) < 1 or info.data.get("min_p", 0.0) > 0
        if value and filters and info.data.get("top_k") in (None, -1):
            raise ValueError(
                "it needs a top_k: top_p and min_p alone may keep most of the vocabulary, which would be recorded for every token; "
                "set top_k, for instance to 512"
            )
        return value

    @property
    def launched(self) -> str | None:
        """The engine with its own copy of the weights, in separate processes: as configured, or what ``auto`` stands for here. None:
        torch."""
        name = self.backend if self.backend != "auto" else "torch" if self.auto_engine is None else self.auto_engine.name
        return None if name == "torch" else name

    @property
    def uses_engines(self) -> bool:
        """Whether engines with their own copy of the weights sample, in separate processes."""
        return self.launched is not None

    @property
    def uses_vllm(self) -> bool:
        return self.launched == "vllm"

    @property
    def uses_extension(self) -> bool:
        """Whether an engine of an extension samples, whose section says what else it can do."""
        return self.launched not in (None, "vllm")

    @property
    def engine_options(self) -> EngineConfig:
        """The section of those engines. Raises UserCodeError for an engine whose extension attaches none."""
        section = getattr(self, self.engine_key, None)
        if not isinstance(section, EngineConfig):
            raise UserCodeError(
                f"the extension of the engine {self.launched!r} declares no section GenerationConfig.{self.engine_key} in strop.sections "
                "that is an EngineConfig"
            )
        return section

    @property
    def engine_key(self) -> str:
        """The name of that section."""
        return f"{self.launched or 'vllm'}_cfg"

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """Further arguments of the engine, passed through: the key ``NAME_kwargs``."""
        return getattr(self, f"{self.launched or 'vllm'}_kwargs", {})

    @property
    def engine_name(self) -> str:
        """The engine's name in messages."""
        return self.engine_options.title if self.uses_engines else "torch"

    @property
    def sends_adapters(self) -> bool:
        """Whether a run with LoRA sends engines only its adapters, over a base that they keep."""
        return self.weight_sync.adapters_alone and self.uses_engines and self.engine_options.takes_adapters

    @property
    def weight_format(self) -> RolloutFormat | None:
        """The number format of the engine's weights; None: the learner's weights in the engine's data type."""
        if self.quantization.format is not None or self.vllm_cfg.precision != "fp8" or self.uses_extension:
            return self.quantization.format
        if self.vllm_cfg.is_mx:
            return "mxfp8"
        return "fp8_block_pow2" if self.vllm_cfg.pow2_weight_scaling_factors else "fp8_block"

    def sampling_options(self, *, validation: bool = False) -> dict[str, Any]:
        """Return keyword arguments of ``strop.sampling.Sampling``."""
        top_k = self.val_top_k if validation else self.top_k
        return {
            "temperature": self.val_temperature if validation else self.temperature,
            "top_p": self.val_top_p if validation else self.top_p,
            "top_k": None if top_k == -1 else top_k,
            "min_p": self.min_p,
            "record_sampling_mask": self.keep_sampling_mask and not validation,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": self.stop_token_ids or (),
            "stop_strings": self.stop_strings or (),
        }

    @property
    def records_sampling_mask(self) -> bool:
        """Whether rollouts that are trained on have the sets of tokens that theirs were sampled from."""
        return Sampling(**self.sampling_options()).records_sampling_mask

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_sampling(key)
        yield from self._check_quantization(key)
        if self.uses_vllm:
            yield from self._check_vllm_installed(key)
            yield from self._check_min_temperature(key)
            yield from self._check_min_p(key)
            yield from self.vllm_cfg.vllm_errors(f"{key}.vllm_cfg")

    def _check_sampling(self, key: str) -> Iterator[Problem]:
        """Yield why the options do not define a distribution, by the same checks as for every request."""
        try:
            for validation in (False, True):
                Sampling(**self.sampling_options(validation=validation))
        except ValueError as error:
            found, _, fix = str(error).partition("; ")
            yield Problem(key, found, f"Set it otherwise: {fix}." if fix else "")

    def _check_quantization(self, key: str) -> Iterator[Problem]:
        chosen, options = self.weight_format, self.vllm_cfg
        yield from self._check_sent_quantized(key)
        if chosen is None:
            yield from self._check_unquantized(key)
            return
        name = f"{key}.quantization.format" if self.quantization.format else f"{key}.vllm_cfg.precision"
        found = f"found {self.quantization.format or options.precision}"
        if not self.quantization.emulate and self.uses_extension:
            yield Problem(
                name,
                f"{found}, which Strop does not publish to {self.engine_name}",
                f"Set {key}.quantization.emulate=true to round the weights that are sent, or {key}.backend=vllm.",
            )
        elif not self.quantization.emulate and not self.uses_vllm:
            yield Problem(
                name,
                f"{found}, but the torch engine has no kernels for it",
                f"Set {key}.quantization.emulate=true to round weights and inputs and compute as before, or {key}.backend=vllm.",
            )
        elif not self.quantization.emulate and chosen not in KERNEL_FORMATS:
            yield Problem(
                name,
                f"{found}, which Strop does not publish to vLLM",
                f"Set it to one of {', '.join(KERNEL_FORMATS)}, or {key}.quantization.emulate=true to round weights instead.",
            )
        if chosen == "mxfp8":
            for option in ("pow2_weight_scaling_factors", "pow2_activation_scaling_factors"):
                if getattr(options, option) is False:
                    yield Problem(
                        f"{key}.vllm_cfg.{option}", "found false, but the scales of MXFP8 are powers of two", "Remove the key."
                    )
        if not self.uses_engines and options.fp8_cache and options.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
            yield Problem(
                f"{key}.vllm_cfg.kv_cache_dtype",
                f"found {options.kv_cache_dtype}, but the torch engine rounds keys and values to E4M3",
                "Set it to fp8, or auto.",
            )

    def _check_sent_quantized(self, key: str) -> Iterator[Problem]:
        in_kernels = self.uses_vllm and self.weight_format is not None and not self.quantization.emulate
        if self.quantization.send_quantized and not in_kernels:
            yield Problem(
                f"{key}.quantization.send_quantized",
                "found true, but no engine of this run accepts values and scales",
                f"Set it to false, or {key}.backend=vllm and {key}.vllm_cfg.precision=fp8 without {key}.quantization.emulate.",
            )

    def _check_unquantized(self, key: str) -> Iterator[Problem]:
        if self.vllm_cfg.is_mx:
            yield Problem(
                f"{key}.vllm_cfg.is_mx",
                f"found true, but {key}.vllm_cfg.precision is {self.vllm_cfg.precision}",
                f"Set {key}.vllm_cfg.precision=fp8 too.",
            )
        if self.quantization.emulate:
            yield Problem(
                f"{key}.quantization.emulate",
                "found true, but no format is set",
                f"Set {key}.quantization.format, for instance to fp8_block, or {key}.vllm_cfg.precision=fp8.",
            )

    def _check_vllm_installed(self, key: str) -> Iterator[Problem]:
        if not packages.is_installed("vllm"):
            yield Problem(
                f"{key}.backend",
                "found vllm, but vLLM is not installed",
                f"`make setup-vllm` in Strop's checkout installs the build for this machine; or set {key}.backend=torch.",
            )

    def _check_min_temperature(self, key: str) -> Iterator[Problem]:
        for name in ("temperature", "val_temperature"):
            value, is_training = getattr(self, name), name == "temperature"
            if 0 < value < MIN_TEMPERATURE and (is_training or value != self.temperature):
                yield Problem(
                    f"{key}.{name}",
                    f"found {value}, but vLLM raises temperatures between 0 and {MIN_TEMPERATURE} to {MIN_TEMPERATURE}, and reports other "
                    "log-probabilities",
                    f"Set it to 0 (greedy), or to {MIN_TEMPERATURE} or more.",
                )

    def _check_min_p(self, key: str) -> Iterator[Problem]:
        if self.vllm_cfg.speculation.method is not None and self.min_p > 0:
            yield Problem(
                f"{key}.min_p",
                f"found {self.min_p}, but vLLM ignores min_p in speculative decoding",
                f"Set it to 0, or {key}.vllm_cfg.speculation.method=null.",
            )

    def quantization_errors(self, key: str, device: str) -> Iterator[Problem]:
        """Yield what vLLM engines cannot quantise with the learner on ``device`` (``auto``: not known yet)."""
        if self.weight_format is not None and not self.quantization.emulate and device == "cpu":
            yield Problem(
                f"{key}.quantization.format" if self.quantization.format else f"{key}.vllm_cfg.precision",
                f"found {self.quantization.format or self.vllm_cfg.precision} on a CPU, for which vLLM has no kernels of FP8",
                f"Set {key}.quantization.emulate=true to round the weights that are sent and compute in {self.vllm_cfg.dtype}, or use a "
                "GPU.",
            )

    def async_errors(self, key: str, device: str) -> Iterator[Problem]:
        """Yield the settings that cannot work in asynchronous training with vLLM engines and the learner on ``device`` (``auto``:
        not known yet).
        """
        if self.colocated.enabled and device.startswith("cuda"):
            yield Problem(
                f"{key}.colocated.enabled",
                "found true, but asynchronous training samples while the learner trains, and an engine on the learner's GPU would be "
                "asleep then",
                "Set it to false, with a GPU for each engine, or train synchronously.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        if self.backend == "auto" and self.auto_engine is not None and self.auto_engine.lacking:
            yield Problem(
                f"{key}.backend",
                f"found auto, which is the torch engine here: {self.auto_engine.reason}{self.auto_engine.detail}",
                f"Set {key}.backend=torch to choose it, or change the setting that vLLM does not support.",
            )
        yield from self._warn_unused_engine_options(key)
        yield from self._warn_unused_resources(key)
        if self.uses_vllm:
            yield from self._warn_unchecked_version(key)
            yield from self.vllm_cfg.vllm_warnings(f"{key}.vllm_cfg")
        if self.uses_engines:
            yield from self._warn_weight_sync(key)

    def _warn_unchecked_version(self, key: str) -> Iterator[Problem]:
        if version := unchecked_version():
            yield Problem(
                f"{key}.backend",
                f"vLLM {version} is installed, and Strop, which patches and reads internal parts of it, was tested with "
                f"{describe_checked()}",
                "`make setup-vllm` in Strop's checkout installs that one; an incompatibility ends the engine when it starts.",
            )

    def _warn_unused_engine_options(self, key: str) -> Iterator[Problem]:
        for name in sorted(plugins.declared("engines").keys() - {self.launched}):
            section = getattr(self, f"{name}_cfg", None)
            others = [] if section is None else changed_keys(f"{key}.{name}_cfg", section)
            if others := [*others, *([f"{key}.{name}_kwargs"] if getattr(self, f"{name}_kwargs", None) else [])]:
                yield Problem(
                    others[0], f"{self.engine_name} does not read {', '.join(others)}", f"Set {key}.backend={name} to use them."
                )
        if self.uses_engines:
            unused, engine, other = changed_keys(f"{key}.torch_cfg", self.torch_cfg), self.engine_name, "torch"
        else:
            ignore: tuple[str, ...] = ("gpu_memory_utilization", "enforce_eager", "async_engine")
            if self.weight_format is not None:
                ignore += QUANTIZATION_KEYS
            unused = changed_keys(f"{key}.vllm_cfg", self.vllm_cfg, ignore=ignore)
            unused += [f"{key}.vllm_kwargs"] if self.vllm_kwargs else []
            unused += changed_keys(f"{key}.weight_sync", self.weight_sync)
            engine, other = "the torch engine", "vllm"
        if unused:
            yield Problem(
                unused[0],
                f"{engine} does not read {', '.join(unused)}",
                f"{'They are' if len(unused) > 1 else 'It is'} for {key}.backend={other}.",
            )

    def _warn_unused_resources(self, key: str) -> Iterator[Problem]:
        changed = changed_keys(f"{key}.colocated.resources", self.colocated.resources)
        if changed and self.colocated.enabled:
            yield Problem(
                changed[0], f"it has no effect: {key}.colocated.enabled is true, so generation shares the devices that train"
            )

    def _warn_weight_sync(self, key: str) -> Iterator[Problem]:
        yield from self.weight_sync.vllm_warnings(f"{key}.weight_sync")


class UnusedGenerationConfig(GenerationConfig):
    """The inference engine in a run on recorded data, which does not sample."""

    def errors(self, key: str) -> Iterator[Problem]:
        yield from self._check_sampling(key)

    def warnings(self, key: str) -> Iterator[Problem]:
        if unused := changed_keys(key, self):
            yield Problem(unused[0], f"a run on recorded data does not sample, and does not read {', '.join(unused)}")
