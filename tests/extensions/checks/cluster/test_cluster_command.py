"""``strop cluster check`` reads the configuration of a run, or keys alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.extensions.checks import cluster_command

CLUSTER = ["cluster.num_nodes=2", "cluster.gpus_per_node=4", "policy.device=cpu"]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that a cluster was checked for, by a stand-in that finds problems."""
    configs: list[Any] = []
    monkeypatch.setattr(cluster_command, "check_cluster", lambda config: configs.append(config) or 1)
    return configs


def test_a_cluster_is_checked_for_a_file_or_for_a_few_keys(checked: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sft: {seed: 5, val_period: 0}\npolicy: {model_name: m}\ndata: {train: {dataset_name: squad}}\n")
    assert cli.main(["cluster", "check", *CLUSTER]) == 1
    assert cli.main(["cluster", "check", "cluster.num_nodes=3", "--config", str(path)]) == 1
    assert [type(config).section for config in checked] == ["grpo", "sft"]
    assert [config.cluster.num_nodes for config in checked] == [2, 3]


def test_a_mistake_about_the_machines_is_found_before_they_are_asked(
    checked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster", "check", "cluster.num_node=2"]) == 2
    assert "Did you mean cluster.num_nodes?" in capsys.readouterr().err
    assert cli.main(["cluster", "check", *CLUSTER, "policy.dtensor_cfg.tensor_parallel_size=3"]) == 2
    assert checked == []


def test_the_cluster_command_asks_only_for_its_action(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["cluster"])
    assert capsys.readouterr().err.rstrip().endswith("required: check")
