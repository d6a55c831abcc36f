"""The Megatron Core learner (``strop.learners``). Imports neither torch nor Megatron Core before a method is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.extensions.megatron.checkpoint.torch_dist import LATEST, find_iteration, model_folder, open_shards
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.models.local_files import ModelShape
from strop.problems import Problem

if TYPE_CHECKING:
    from strop.config import TrainingRunConfig
    from strop.distributed.workers.learner_worker import RankModels
    from strop.extensions.megatron.megatron_dims import MegatronDims
    from strop.extensions.megatron.megatron_policy import MegatronPolicy
    from strop.lazy_torch import Tensor
    from strop.learner.parallel.shard_files import ShardedReader


class MegatronBackend:
    """The Megatron Core learner."""

    title = "Megatron Core"
    shards_title = "shards of Megatron Core"
    section = "megatron_cfg"

    def find_shards(self, folder: Path) -> Path | None:
        return find_iteration(folder)

    def model_folder(self, shards: Path) -> Path:
        return model_folder(shards)

    def open_shards(self, shards: Path) -> ShardedReader:
        return open_shards(shards)

    def read_shards(self, shards: Path, config: Any) -> Mapping[str, Tensor]:
        from strop.extensions.megatron.checkpoint.hugging_face import read_hugging_face_weights

        return read_hugging_face_weights(shards, config)

    def is_index(self, file: str) -> bool:
        return file == LATEST or file.endswith((".metadata", ".distcp"))

    def explain(self, name: str) -> str:
        return f"{name} has a checkpoint of Megatron Core; convert it first: strop export {name} FOLDER"

    def load_policy(self, config: TrainingRunConfig) -> MegatronPolicy:
        from strop.extensions.megatron.megatron_policy import load_megatron_policy

        return load_megatron_policy(config)

    def build_models(self, *arguments: Any) -> RankModels:
        from strop.extensions.megatron.megatron_rank_builders import build_megatron_rank_models

        return build_megatron_rank_models(*arguments)

    def write_model_folder(self, policy: MegatronPolicy, config: TrainingRunConfig, folder: Path) -> None:
        policy.write_folder(folder)
        if config.policy.sends_draft:
            policy.write_draft(folder.parent / "draft")

    def make_dims(self, section: MegatronConfig, world: int) -> MegatronDims:
        from strop.extensions.megatron.megatron_dims import MegatronDims

        return MegatronDims.from_config(section, world)

    def examine(self, config: TrainingRunConfig, key: str, model: Any, values: Mapping[str, Any]) -> Iterator[Problem]:
        from strop.extensions.megatron.families.find_family import check_architecture
        from strop.extensions.megatron.megatron_dims import model_errors

        section = MegatronConfig.of(model)
        try:
            check_architecture(section, model.model_name, values)
        except ValueError as error:
            yield Problem("" if str(error).startswith("policy.megatron_cfg.") else f"{key}.megatron_cfg.enabled", str(error))
        if (shape := ModelShape.from_hf(model.model_name, values)) is not None:
            yield from model_errors(section, f"{key}.megatron_cfg", shape)
