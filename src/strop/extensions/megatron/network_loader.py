"""Load models of Megatron Core on the ranks: each in its own layout, or in another model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strop.extensions.megatron.adapters.stage_adapters import StageAdapters
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_dims import MegatronDims, model_errors
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.extensions.megatron.model_files import ModelFiles
from strop.extensions.megatron.models.build_stages import build_stages
from strop.extensions.megatron.passes.schedule import prepare_schedule
from strop.extensions.megatron.weights.shard_import import ScoreInit, load_weights
from strop.extensions.megatron.weights.weight_reader import FileWeights
from strop.models.local_files import ModelShape
from strop.problems import raise_problems


@dataclass(frozen=True)
class NetworkLoader:
    """Loads networks on all ranks at the same time. They have the same number of ranks, and sizes of their own."""

    device: str
    world: int

    def make_layout(self, config: MegatronConfig, files: ModelFiles, key: str) -> MegatronLayout:
        """Make the process groups of a model. ``key``: of its section. Raises ValueError for sizes that do not divide it."""
        if (shape := ModelShape.from_hf(files.name, files.config.to_dict())) is not None:
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
        adapter_seed: int | None = None,
        key: str = "megatron_cfg",
    ) -> MegatronNetwork:
        """Build this rank's stages and read their weights.

        Args:
            score: The initial score layer of a model with values; None is a language model.
            adapter_seed: Of the adapters that the section asks for; None leaves them out: the network is not trained.
        """
        stages = build_stages(files.config, config, layout, dtype=dtype, head="lm" if score is None else "scalar")
        prepare_schedule(stages[0].config)
        reader = FileWeights(files.folder)
        with layout.activate():
            load_weights(stages, files.config, reader, score_init=score or ScoreInit(seed=0))
            adapters = None
            if config.peft.enabled and adapter_seed is not None:
                adapters = StageAdapters(stages, files.config, config.peft, base=files.name, seed=adapter_seed, key=f"{key}.peft")
        return MegatronNetwork(stages, files.config, layout, chunk=chunk or 1 << 40, adapters=adapters)
