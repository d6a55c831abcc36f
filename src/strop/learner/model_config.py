"""The keys that all trained models share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from strop.base_config import Device, PathText, Precision, follows, subsection
from strop.data.packing_config import CPU_TOKENS, DynamicBatchingConfig, SequencePackingConfig, TokenBudget
from strop.learner.learner_config import TORCH, WithLearner
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.torch.optimizer_config import EmaConfig, OptimizerConfig, SchedulerConfig
from strop.models.quantization.float8_config import Float8Config
from strop.models.routing.router_config import RouterLossConfig
from strop.models.tokenizer_config import ImageProcessorConfig, TokenizerConfig
from strop.problems import Problem


class ModelConfig(WithLearner):
    """A model and its training."""

    identity_keys: ClassVar[tuple[str, ...]] = (
        "model_name",
        "hf_config_overrides",
        "weights_dtype",
        "freeze_moe_router",
        "dequantize_base_checkpoint",
        "freeze_vision_tower",
    )
    unrelated_keys: ClassVar[tuple[str, ...]] = (
        "device",
        "num_threads",
        "train_micro_batch_size",
        "logprob_batch_size",
        "logprob_chunk_size",
        "attention_kernel",
        "compile",
    )

    model_name: PathText = Field(..., min_length=1, description="A hub name or a folder with a Hugging Face model.")
    tokenizer: TokenizerConfig = subsection(TokenizerConfig)
    image_processor: ImageProcessorConfig = subsection(ImageProcessorConfig)
    hf_config_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Values set on the model's Hugging Face configuration."
    )
    dequantize_base_checkpoint: bool = Field(
        False,
        description="Dequantise the weights of model_name while they are loaded: FP8 in blocks, MXFP4 or compressed-tensors. A checkpoint "
        "without quantised weights is loaded as it is.",
    )
    device: Device = Field("auto", description="cpu, cuda or cuda:N; auto is the first GPU if there is one.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; null is torch's own choice (threads).")
    precision: Precision = Field("bfloat16", description="Compute precision: bfloat16 (autocast) or float32.")
    weights_dtype: Precision = Field(
        "float32",
        description="Data type of the weights that train and sample. bfloat16 keeps float32 master weights in the optimizer: "
        "no cast in each forward pass and a reference policy of half the size, for 2 more bytes per trained "
        "weight.",
    )
    max_total_sequence_length: int = Field(
        512, ge=2, description="Longest prompt and completion together, over all turns (tokens)."
    )
    train_global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rollouts per optimizer step; null is the whole batch; of recorded data, at most 32 examples (rollouts).",
    )
    train_micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Sets the default token budget of a training micro-batch, with max_total_sequence_length; null leaves it to the device "
        "(rollouts).",
    )
    logprob_batch_size: int | None = follows(
        ".train_micro_batch_size",
        standalone=None,
        ge=1,
        description="Sets the default token budget of a micro-batch scored without gradients; null leaves it to the device (rollouts).",
    )
    logprob_chunk_size: int | None = Field(
        None,
        ge=1,
        description="Tokens with float32 logits in memory at once; null is 1024, and on a GPU as many as a 32nd of its memory holds, up to "
        "8192, unless filters or soft caps need the slower path (tokens).",
    )
    attention_kernel: Literal["auto", "plain", "flash", "blockwise", "flex"] = Field(
        "auto",
        description="The learner's attention kernel for packed rows: plain (products with a mask, padded to the longest sibling), flash "
        "(torch's fused kernels, merged over the prefix tree), blockwise (torch code, any option), flex (FlexAttention, compiled); auto "
        "chooses by device, dtype and length.",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="Compile the decoder layers of the learner by torch.compile, attention left out: true, false, or auto (on GPUs "
        "with Triton, for dense models whose layers are of a known form). A CPU needs a C++ compiler.",
    )
    freeze_moe_router: bool = Field(
        False, description="Freeze the routers, which choose the experts of a token; no effect in a model without experts."
    )
    router_losses: RouterLossConfig = subsection(RouterLossConfig)
    freeze_vision_tower: bool = Field(
        False,
        description="Freeze the vision tower; no effect in a text model. A separate projector into the language model "
        "(multi_modal_projector, connector) is still trained.",
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient to this norm; null does not clip.")
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    scheduler: SchedulerConfig | None = Field(
        None,
        description="Learning-rate schedule, in steps of scheduler_unit: {name, kwargs}, such as {name: cosine, kwargs: "
        "{warmup_steps: 50, min_ratio: 0.1}}, or a list of them ending in {milestones: [...]}. Names: constant, "
        "linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, wsd, or a dotted torch class. kwargs: "
        "warmup_steps or warmup_ratio, warmup_init_ratio, total_steps (null is the run's), min_ratio, and the "
        "schedule's own. null is constant.",
    )
    scheduler_unit: Literal["batch", "optimizer_step"] = Field(
        "batch",
        description="Unit of a schedule step: a pass over a batch, with any number of optimizer steps (as in NeMo-RL and verl), or an "
        "optimizer_step (as in TRL).",
    )
    ema: EmaConfig = subsection(EmaConfig)
    dtensor_cfg: DtensorConfig = subsection(DtensorConfig)
    fp8: Float8Config = subsection(Float8Config)
    sequence_packing: SequencePackingConfig = subsection(SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = subsection(DynamicBatchingConfig)

    @property
    def batching(self) -> SequencePackingConfig | DynamicBatchingConfig:
        """The section whose token budgets apply: for packed micro-batches, or for padded ones."""
        return self.sequence_packing if self.sequence_packing.enabled else self.dynamic_batching

    @property
    def batching_key(self) -> str:
        """The name of that section."""
        return "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"

    @property
    def train_tokens(self) -> TokenBudget:
        """Token budget of a training micro-batch. What is left to the device is that of a CPU (``with_gpu_budgets``)."""
        return self.batching.train_mb_tokens or self._budget_of(self.train_micro_batch_size)

    @property
    def score_tokens(self) -> int:
        """Token budget of a micro-batch scored without gradients."""
        return self.batching.logprob_mb_tokens or self._budget_of(self.logprob_batch_size)

    def _budget_of(self, rollouts: int | None) -> int:
        length = self.max_total_sequence_length
        return max(CPU_TOKENS, length) if rollouts is None else rollouts * length

    @property
    def adapter_rank(self) -> int | None:
        """The rank of the trained adapters in any backend; None if all weights are trained."""
        return self.learner.adapters.dim if self.learner.adapters.enabled else None

    @field_validator("weights_dtype")
    @classmethod
    def _check_weights_dtype(cls, weights_dtype: str, values: ValidationInfo) -> str:
        return check_weights_dtype(weights_dtype, values)

    def errors(self, key: str) -> Iterator[Problem]:
        if self.compile is True and self.uses_torch:
            yield from self._check_compile_alone(key)
        yield from self._check_float8(key)
        if self.router_losses.observes and self.uses_torch:
            yield from self._check_router_losses(f"{key}.router_losses", key)
        yield from self._check_learner(key)

    def _check_learner(self, key: str) -> Iterator[Problem]:
        enabled = [name for name, section in self.learner_sections.items() if section.enabled and name != TORCH]
        if len(enabled) > 1:
            yield Problem(
                f"{key}.{enabled[1]}.enabled", f"found true, but {key}.{enabled[0]}.enabled is true too", "Set one to false."
            )
        if not self.dtensor_cfg.enabled and self.uses_torch:
            others = "".join(f", and {key}.{name}.enabled is false too" for name in self.learner_sections if name != TORCH)
            yield Problem(
                f"{key}.dtensor_cfg.enabled",
                f"found false{others}, which leaves no learner",
                f"Set {key}.dtensor_cfg.enabled=true.",
            )

    def _check_float8(self, key: str) -> Iterator[Problem]:
        yield from self.fp8.float8_errors(f"{key}.fp8", self.device)
        if not self.fp8.enabled:
            return
        if (size := self.dtensor_cfg.tensor_parallel_size) > 1:
            yield Problem(
                f"{key}.fp8.enabled",
                f"found true, but tensor-parallel ranks ({key}.dtensor_cfg.tensor_parallel_size = {size}) would each scale their own shard",
                f"Set it to false, or {key}.dtensor_cfg.tensor_parallel_size=1 and divide the model by FSDP.",
            )

    def warnings(self, key: str) -> Iterator[Problem]:
        yield from self.fp8.float8_warnings(f"{key}.fp8")

    def _check_router_losses(self, section: str, key: str) -> Iterator[Problem]:
        """Yield settings that are incompatible with router losses."""
        sizes = self.dtensor_cfg
        for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(sizes, name)) > 1:
                yield Problem(
                    f"{key}.dtensor_cfg.{name}",
                    f"found {size}, but {section} compares the experts of a whole rollout in one process, and these ranks split it",
                    f"Set it to 1, where data- and expert-parallel ranks work, or the coefficients of {section} to 0.",
                )
        if self.compile is True:
            yield Problem(
                f"{key}.compile",
                f"found true, but {section} observes the routers, which compiled layers do not expose",
                f"Set it to auto or false, or the coefficients of {section} to 0.",
            )

    def _check_compile_alone(self, key: str) -> Iterator[Problem]:
        """Yield sections that are incompatible with compiled layers."""
        for section, refused, reason, value in (
            ("sequence_packing.enabled", not self.sequence_packing.enabled, "padded rows are read by uncompiled layers", "true"),
            (
                "dtensor_cfg.lora_cfg.enabled",
                self.dtensor_cfg.lora_cfg.enabled,
                "a compiled layer may not notice adapters switched off",
                "false",
            ),
        ):
            if refused:
                yield Problem(
                    f"{key}.compile",
                    f"found true, but {key}.{section} is {str(value == 'false').lower()}: {reason}",
                    f"Set it to auto or false, or {key}.{section}={value}.",
                )


def check_weights_dtype(weights_dtype: str, values: ValidationInfo) -> str:
    """Check the weights of a section against its ``precision``. Raises ValueError."""
    if weights_dtype == "bfloat16" and values.data.get("precision") == "float32":
        raise ValueError("with bfloat16 weights nothing is computed in float32; set precision=bfloat16, or weights_dtype=float32")
    return weights_dtype


class ScoringModelConfig(WithLearner):
    """A model that only scores, such as a teacher."""

    if TYPE_CHECKING:  # each declares these keys, with its own defaults and descriptions
        model_name: str
        tokenizer: TokenizerConfig
        precision: Precision
        weights_dtype: Precision
        dtensor_cfg: DtensorConfig

    @property
    def on_ranks(self) -> bool:
        """Whether the ranks of the learner hold it, rather than processes of its own."""
        return True
