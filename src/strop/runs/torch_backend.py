"""The torch learner on ranks (``strop.learners``). Imports no torch before a method is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.config import TrainingRunConfig
    from strop.distributed.workers.learner_worker import RankModels
    from strop.lazy_torch import Tensor
    from strop.learner.parallel.dtensor_config import DtensorConfig
    from strop.learner.parallel.parallel_dims import ParallelDims
    from strop.learner.parallel.shard_files import ShardedReader
    from strop.problems import Problem
    from strop.runs.models import LoadedPolicy

METADATA = ".metadata"  # as torch's distributed checkpoints have it


class TorchBackend:
    """The torch learner."""

    title = "the torch learner"
    shards_title = "shards of several ranks"
    section = "dtensor_cfg"

    def find_shards(self, folder: Path) -> Path | None:
        return folder if (folder / METADATA).is_file() else None

    def model_folder(self, shards: Path) -> Path:
        return shards

    def open_shards(self, shards: Path) -> ShardedReader:
        from strop.learner.parallel.shard_files import ShardedReader

        return ShardedReader(shards)

    def read_shards(self, shards: Path, config: Any) -> Mapping[str, Tensor]:
        from strop.learner.parallel.shard_files import read_whole

        return read_whole(self.open_shards(shards))

    def is_index(self, file: str) -> bool:
        return file.endswith((METADATA, ".distcp"))

    def explain(self, name: str) -> str:
        return f"{name} has the shards of a distributed checkpoint; convert them first: strop export {name} FOLDER"

    def load_policy(self, config: TrainingRunConfig) -> LoadedPolicy:
        from strop.runs.cluster.torch_rank_builders import load_rank_policy

        return load_rank_policy(config)

    def build_models(self, *arguments: Any) -> RankModels:
        from strop.runs.cluster.torch_rank_builders import build_rank_models

        return build_rank_models(*arguments)

    def write_model_folder(self, policy: LoadedPolicy, config: TrainingRunConfig, folder: Path) -> None:
        from strop.runs.models import write_model_folder

        write_model_folder(policy, folder, config.policy)

    def make_dims(self, section: DtensorConfig, world: int) -> ParallelDims:
        from strop.learner.parallel.parallel_dims import ParallelDims

        return ParallelDims.from_config(section, world)

    def examine(self, config: TrainingRunConfig, key: str, model: Any, values: Mapping[str, Any]) -> Iterator[Problem]:
        from strop.runs.dry_run.examined_models import examine_torch_model

        return examine_torch_model(config, key, model, values)
