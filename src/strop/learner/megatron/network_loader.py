"""Load models of Megatron Core on the ranks: each in a layout of its own, or in another model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strop.learner.megatron.layout import MegatronLayout
from strop.learner.megatron.megatron_config import MegatronConfig
from strop.learner.megatron.megatron_dims import MegatronDims, MegatronModelShape, model_errors
from strop.learner.megatron.megatron_network import MegatronNetwork
from strop.learner.megatron.model_files import ModelFiles
from strop.learner.megatron.models.build_stages import build_stages
from strop.learner.megatron.models.gpt_stage import GptStage
from strop.learner.megatron.passes.schedule import prepare_schedule
from strop.learner.megatron.weights.shard_import import load_weights
from strop.learner.megatron.weights.weight_reader import SafetensorsReader
from strop.problems import raise_problems

SCORE = "score.weight"


@dataclass(frozen=True)
class ScoreInit:
    """The initial score layer of a model with values, where its files have none: a normal distribution with mean 0."""

    seed: int
    deviation: float | None = None  # None: the model's initializer_range


@dataclass(frozen=True)
class NetworkLoader:
    """Loads networks on all ranks at the same time. They have the same number of ranks, and sizes of their own."""

    device: str
    world: int

    def make_layout(self, config: MegatronConfig, files: ModelFiles, key: str) -> MegatronLayout:
        """Make the process groups of a model. ``key``: of its section. Raises ValueError for sizes that do not divide it."""
        if (shape := MegatronModelShape.from_hf(files.name, files.config.to_dict())) is not None:
            raise_problems(model_errors(config, key, shape))
        return MegatronLayout(
            MegatronDims.from_config(config, self.world), self.device, gloo_groups=config.use_gloo_process_groups
        )

    def load(
        self,
        files: ModelFiles,
        config: MegatronConfig,
        layout: MegatronLayout,
        *,
        dtype: torch.dtype,
        chunk: int | None,
        score: ScoreInit | None = None,
    ) -> MegatronNetwork:
        """Build this rank's stages and read their weights. ``score``: of a model with values, None: a language model."""
        stages = build_stages(files.config, config, layout, dtype=dtype, head="lm" if score is None else "scalar")
        prepare_schedule(stages[0].config)
        reader = SafetensorsReader(files.folder)
        with layout.activate():
            load_weights(stages, files.config, reader)
        if score is not None and SCORE not in reader:
            _init_score(stages, files, score)
        return MegatronNetwork(stages, files.config, layout, chunk=chunk or 1 << 40)


@torch.no_grad()
def _init_score(stages: Sequence[GptStage], files: ModelFiles, score: ScoreInit) -> None:
    """Draw the weights that a classifier of Transformers begins with; they depend on the seed only."""
    deviation = float(getattr(files.config, "initializer_range", 0.02)) if score.deviation is None else score.deviation
    for stage in stages:
        if stage.post_process:
            generator = torch.Generator().manual_seed(score.seed)
            stage.score.weight.copy_(deviation * torch.randn(stage.score.weight.shape, generator=generator))
