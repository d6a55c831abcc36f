"""A learner of a stranger's package, found by its entry points: it is chosen, checked and described, and its weights are no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.tiny import build_tiny
from support.declared_packages import declare, finding, run_commands
from support.overrides import RUN

PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from strop.learner.learner_config import LearnerSection
from strop.models.lora_config import LoraConfig
from strop.problems import Problem


class TheirConfig(LearnerSection):
    backend: ClassVar[str] = "theirs"
    title: ClassVar[str] = "Their learner"
    adapters_key: ClassVar[str] = "lora"
    enabled: bool = Field(False, description="Train with it.")
    ranks: int = Field(1, ge=1, description="Ranks that share a model.")
    adapters = LoraConfig()
    largest_size = 1

    def size_errors(self, key, devices, *, uses_ray):
        if devices % self.ranks:
            yield Problem(f"{key}.ranks", f"found {self.ranks}, and {devices} devices train", "Set it to 1.")

    def errors_of_run(self, key, config):
        if self.enabled and config.policy.ema.enabled:
            yield Problem("policy.ema.enabled", "found true, but theirs keeps no average", "Set it to false.")


@dataclass(frozen=True)
class TheirDims:
    data: int
    world_size: int

    def __str__(self):
        return f"{self.data} of theirs"


class TheirLearner:
    title, shards_title, section = "Their learner", "theirs in one file", "their_cfg"

    def find_shards(self, folder):
        return folder if (folder / "theirs.bin").is_file() else None

    def model_folder(self, shards):
        return shards

    def open_shards(self, shards):
        from strop.learner.parallel.shard_files import InMemoryReader

        return InMemoryReader(self.read_shards(shards, None))

    def read_shards(self, shards, config):
        from safetensors.torch import load_file

        return load_file(shards / "theirs.bin")

    def is_index(self, file):
        return file == "theirs.bin"

    def explain(self, name):
        return f"{name} has theirs: strop export {name} FOLDER"

    def make_dims(self, section, world):
        return TheirDims(world // section.ranks, world)

    def examine(self, config, key, model, values):
        yield Problem(f"{key}.model_name", f"theirs does not train {values['model_type']}", "Name another.")
"""
ENTRY_POINTS = """
[strop.sections]
ModelConfig.their_cfg = theirs:TheirConfig
TeacherConfig.their_cfg = theirs:TheirConfig
[strop.learners]
theirs = theirs:TheirLearner
"""
THEIRS = ["policy.their_cfg.enabled=true", "policy.backend=theirs", "cluster.gpus_per_node=4", "policy.generation.backend=torch"]
DRY_RUN = ["grpo", *RUN, "policy.device=cpu", *THEIRS, "--dry-run"]


def save_as_theirs(folder: Path) -> int:
    """Save a tiny model as their learner does, and return the size of its weights in bytes."""
    weights = (build_tiny(folder) / "model.safetensors").rename(folder / "theirs.bin")
    return weights.stat().st_size


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "theirs.py").write_text(PACKAGE)
    declare(folder, "theirs", ENTRY_POINTS)
    return folder


@pytest.mark.slow
def test_it_is_described_and_checked_as_the_torch_learner_is(package: Path, tmp_path: Path) -> None:
    (_, described, _), *refusals = run_commands(
        tmp_path,
        finding(package),
        [*DRY_RUN, "policy.their_cfg.ranks=2"],
        [*DRY_RUN, "policy.their_cfg.ranks=3", "policy.ema.enabled=true"],
        [*DRY_RUN, "policy.backend=torch"],
        [*DRY_RUN, "cluster.backend=local", "cluster.gpus_per_node=1"],
    )
    assert "4 ranks on 1 node: 2 of theirs" in described
    refused, unused, alone = (said for _, _, said in refusals)
    assert "policy.their_cfg.ranks: found 3, and 4 devices train" in refused and "theirs keeps no average" in refused
    assert "policy.their_cfg.enabled: found true, but policy.backend is torch" in unused
    assert "cluster.backend: found local, but Their learner runs on ranks" in alone


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_it_saved_is_refused_as_a_model(package: Path, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    save_as_theirs(tmp_path / "theirs")
    (_, _, whole), (_, _, shards) = run_commands(
        tmp_path,
        finding(package),
        [*DRY_RUN, f"policy.model_name={model.name}"],
        ["grpo", *RUN, "policy.device=cpu", "policy.model_name=theirs", "--dry-run"],
    )
    assert "theirs does not train" in whole
    assert "theirs has theirs: strop export theirs FOLDER" in shards
