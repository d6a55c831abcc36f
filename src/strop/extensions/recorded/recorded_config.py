"""The configurations of ``strop sft``, ``strop dpo`` and ``strop rm``: training on recorded conversations and preferences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from strop.algorithm_factory import AlgorithmSetting
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.base_config import BaseConfig, PathText, default_of, sets, subsection
from strop.checkpointing.checkpointing_config import CheckpointingConfig
from strop.config.schema.grpo_config import AlgorithmConfig
from strop.config.schema.policy_config import PolicyConfig
from strop.config.schema.run_config import OF_PAIRS, OF_RAW_TEXT, TrainingRunConfig
from strop.generation.generation_config import UnusedGenerationConfig
from strop.monitoring.console_columns import (
    ENTROPY,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    SPEED,
    VALIDATION_LOSS,
    Column,
)
from strop.problems import Problem
from strop.trainer.training_config import TrainingConfig

if TYPE_CHECKING:
    from strop.data.sources.source import DataSource

OF_PAIRS_SHOWN = (Column("accuracy", "train/accuracy", 3), Column("margin", "train/margin", 3))
VALIDATION_ACCURACY = Column("val acc", "validation/accuracy", 3)
TRAINING = (GRAD_NORM, LEARNING_RATE, SPEED)


class RecordedTrainingConfig(TrainingConfig):
    """Validation of runs on recorded data."""

    val_batches: int = Field(
        -1, ge=-1, description="Batches of val_global_batch_size examples in each validation; -1 is all (batches)."
    )
    val_global_batch_size: int = Field(32, ge=1, description="Examples of a validation batch (examples).")
    val_micro_batch_size: int = Field(
        1,
        ge=1,
        description="Accepted for NeMo-RL recipes, without effect: policy.sequence_packing.logprob_mb_tokens cuts "
        "micro-batches (examples).",
    )

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        if self.val_micro_batch_size != default_of(self, "val_micro_batch_size"):
            tokens, section = config.policy.score_tokens, config.policy.batching_key
            yield Problem(
                f"{key}.val_micro_batch_size",
                f"found {self.val_micro_batch_size}, which has no effect: policy.{section}.logprob_mb_tokens = {tokens} cuts the "
                "micro-batches of validation, whose result does not depend on it",
            )


class RecordedCheckpointingConfig(CheckpointingConfig):
    """Defaults for runs on recorded data, which are ranked by a loss."""

    # val_loss and validation-default_loss are NeMo-RL's names for the loss.
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "nll", "val_loss", "validation-default_loss")

    checkpoint_dir: PathText = Field("results/recorded", min_length=1, description="Folder of the step_N folders.")
    metric_name: str | None = Field(
        "val:loss", description="Metric that ranks checkpoints, train:NAME or val:NAME; null keeps the newest."
    )
    higher_is_better: bool = Field(False, description="Whether a larger metric is better.")


class RecordedPolicyConfig(PolicyConfig):
    """The policy of a run on recorded data, which does not sample."""

    generation: UnusedGenerationConfig = subsection(UnusedGenerationConfig)

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super(PolicyConfig, self).errors(key)
        yield from self._check_backend(key)
        if self.deterministic:
            yield from self._check_deterministic(key)

    def warnings(self, key: str) -> Iterator[Problem]:
        yield from super(PolicyConfig, self).warnings(key)
        yield from self._warn_unused_batch_size(key)
        if self.offload is True:
            yield Problem(f"{key}.offload", "it has no effect: a run on recorded data has no engine to make room for")
        if self.router_replay.enabled:
            yield Problem(f"{key}.router_replay.enabled", "it has no effect: recorded data has no experts that an engine chose")
        if self.router_replay.indexers:
            yield Problem(f"{key}.router_replay.indexers", "it has no effect: recorded data has no tokens that an engine chose")


class SftConfig(RecordedTrainingConfig):
    """Supervised fine-tuning."""

    only_unmask_final: bool = Field(
        False, description="Take the loss on the last assistant turn only; false is on all assistant turns."
    )


class SftAlgorithmConfig(AlgorithmConfig):
    """The supervised loss."""

    name: str = Field("sft", min_length=1, description="sft, or module:Class.")


class DpoConfig(RecordedTrainingConfig):
    """Preference optimisation. Options of other algorithms are keys of algorithm."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("precompute_reference",)

    reference_policy_kl_penalty: float | None = sets(
        "beta",
        None,
        gt=0,
        description="Beta: a larger one keeps the policy closer to the reference. null is the algorithm's own (dpo: 0.05).",
    )
    preference_average_log_probs: bool | None = sets(
        "average_log_probs",
        None,
        description="Compare means over tokens instead of sums. null is the algorithm's own (dpo: false).",
    )
    sft_average_log_probs: bool | None = Field(
        None,
        description="Take the mean over the tokens of each chosen answer in the SFT term instead of the sum. null is the "
        "algorithm's own.",
    )
    preference_loss_weight: float | None = sets(
        "preference_weight", None, ge=0, description="Weight of the preference loss; null is the algorithm's own (1)."
    )
    sft_loss_weight: float | None = sets(
        "sft_weight",
        None,
        ge=0,
        description="Weight of the negative log-likelihood of chosen answers; null is the algorithm's own (dpo: 0).",
    )
    precompute_reference: bool = Field(
        False,
        description="Compute the reference's log-probabilities of all data once before training, into the log folder; false "
        "keeps a frozen copy of the policy and computes them at each step.",
    )

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        streamed = [entry for entry in config.data.train if entry.streaming]
        if self.precompute_reference and streamed:
            yield Problem(
                f"{key}.precompute_reference",
                f"found true, which reads all data before the first step, but {streamed[0].data_name} is streamed",
                "Set it to false: the reference then scores each step.",
            )


class DpoAlgorithmConfig(AlgorithmConfig):
    """The preference loss."""

    name: str = Field(
        "dpo",
        min_length=1,
        description="dpo, ipo, cdpo, robust_dpo, exo_pair, nca_pair, bco_pair, sppo_hard, discopop, aot, aot_unpaired, apo_zero, apo_down, "
        "slic, simpo, alphapo, cpo, orpo, kto, apo_zero_unpaired, or module:Class.",
    )


class RmConfig(RecordedTrainingConfig):
    """Reward modelling."""

    use_margin: bool = sets("use_margin", False, description="Require the scores of a pair to differ by the data's margin.")
    centering: float = sets(
        "centering",
        0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which centres them at 0 (arXiv 2312.09244).",
    )


class RmAlgorithmConfig(AlgorithmConfig):
    """The loss of a reward model."""

    name: str = Field("reward_model", min_length=1, description="reward_model, or module:Class.")


class RewardModelConfig(BaseConfig):
    """The kind of reward model."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Train a sequence classifier with one label.")
    reward_model_type: Literal["bradley_terry", "regression"] = Field(
        "bradley_terry", description="Scores whose differences say which answer is better."
    )

    def errors(self, key: str) -> Iterator[Problem]:
        if not self.enabled:
            yield Problem(
                f"{key}.enabled", "found false, but strop rm trains a sequence classifier with one label", "Set it to true."
            )


class RmPolicyConfig(RecordedPolicyConfig):
    """The model that becomes a reward model."""

    reward_model_cfg: RewardModelConfig = subsection(RewardModelConfig)


class RecordedRunConfig(TrainingRunConfig):
    """A run on recorded data."""

    checkpointing: RecordedCheckpointingConfig = subsection(RecordedCheckpointingConfig)
    policy: RecordedPolicyConfig

    @property
    def recorded_training(self) -> RecordedTrainingConfig:
        section: RecordedTrainingConfig = getattr(self, self.section)
        return section

    def read_rows(self, source: DataSource) -> Sequence[Any]:
        from strop.algorithm_factory import find_algorithm
        from strop.extensions.recorded.examples import EXAMPLE_READERS

        kind = find_algorithm(self.algorithm.name).recorded_data
        examples: Sequence[Any] = EXAMPLE_READERS[kind](source) if kind in EXAMPLE_READERS else ()
        return [examples[index] for index in range(len(examples))]


class SftRunConfig(RecordedRunConfig):
    """Supervised fine-tuning on conversations."""

    section: ClassVar[str] = "sft"
    learns: ClassVar[str] = "learns from recorded conversations"
    unread_keys: ClassVar[tuple[str, ...]] = OF_PAIRS
    console: ClassVar[tuple[Column, ...]] = (
        LOSS,
        VALIDATION_LOSS,
        Column("tokens", "train/tokens_trained", 0),
        ENTROPY,
        *TRAINING,
    )

    sft: SftConfig = subsection(SftConfig)
    algorithm: SftAlgorithmConfig = subsection(SftAlgorithmConfig)

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return algorithm.recorded_data == "conversations" and algorithm.predict == "tokens"


class DpoRunConfig(RecordedRunConfig):
    """Preference optimisation on pairs of answers, or on unpaired preferences (KTO)."""

    section: ClassVar[str] = "dpo"
    learns: ClassVar[str] = "learns from recorded preferences, paired or unpaired"
    unread_keys: ClassVar[tuple[str, ...]] = OF_RAW_TEXT
    console: ClassVar[tuple[Column, ...]] = (
        LOSS,
        *OF_PAIRS_SHOWN,
        Column("chosen", "train/rewards_chosen_mean", 3),
        Column("rejected", "train/rewards_rejected_mean", 3),
        Column("desired", "train/rewards_desirable", 3),  # of KTO
        Column("undesired", "train/rewards_undesirable", 3),
        VALIDATION_LOSS,
        VALIDATION_ACCURACY,
        *TRAINING,
    )

    dpo: DpoConfig = subsection(DpoConfig)
    algorithm: DpoAlgorithmConfig = subsection(DpoAlgorithmConfig)

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return algorithm.recorded_data in ("preferences", "judgements") and algorithm.predict == "tokens"

    def algorithm_settings(self) -> Iterator[AlgorithmSetting]:
        if (mean := self.dpo.sft_average_log_probs) is not None:
            aggregation = "sequence_mean" if mean else "sequence_sum"
            yield AlgorithmSetting("dpo.sft_average_log_probs", "sft_aggregation", aggregation)

    @property
    def filled_columns(self) -> frozenset[str]:
        return frozenset({REFERENCE_LOGPROBS} if self.dpo.precompute_reference else ())


class RmRunConfig(RecordedRunConfig):
    """A reward model from pairs of answers."""

    section: ClassVar[str] = "rm"
    learns: ClassVar[str] = "scores whole rollouts, as a reward model does"
    unread_keys: ClassVar[tuple[str, ...]] = (*OF_RAW_TEXT, "label_key")
    console: ClassVar[tuple[Column, ...]] = (LOSS, *OF_PAIRS_SHOWN, VALIDATION_LOSS, VALIDATION_ACCURACY, *TRAINING)
    trains_scores: ClassVar[bool] = True

    rm: RmConfig = subsection(RmConfig)
    algorithm: RmAlgorithmConfig = subsection(RmAlgorithmConfig)
    policy: RmPolicyConfig

    @classmethod
    def suits(cls, algorithm: Algorithm) -> bool:
        return bool(algorithm.recorded_data) and algorithm.predict == "last_token"

    def algorithm_settings(self) -> Iterator[AlgorithmSetting]:
        if (kind := self.policy.reward_model_cfg.reward_model_type) != "bradley_terry":
            yield AlgorithmSetting("policy.reward_model_cfg.reward_model_type", "kind", kind)
