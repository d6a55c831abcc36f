"""Log-probabilities of the reference that are computed once, before training (``dpo.precompute_reference``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from loop.fakes import Recorder
from strop.algorithms.base import Algorithm
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.config import TRAINING_RUNS, load_config
from strop.extensions.recorded.preference.reference_free import SimPO
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.recorded_config import RecordedRunConfig
from strop.extensions.recorded.recorded_run import RecordedSource
from strop.runs.backend import LocalBackend, make_columns
from strop.runs.models import LoadedPolicy, load_policy, make_learners, make_trained_networks
from strop.sampling import Sampling
from strop.trainer.run import TrainOptions
from strop.types import Group
from support.recorded import random_groups
from support.rollouts import pack_for

SAMPLING = Sampling()
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


def asked(source: Any, batch: Any, groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    return dict(asyncio.run(source.columns(batch, groups)))


def recorded(model: Path, logs: Path, *overrides: str) -> RecordedRunConfig:
    base = [f"policy.model_name={model}", "policy.precision=float32", "policy.device=cpu", "dpo.val_period=0"]
    base += ["data.train.dataset_name=squad", f"logger.log_dir={logs}", "dpo.precompute_reference=true"]
    found = load_config(None, [*base, *overrides], root=TRAINING_RUNS["dpo"]).config
    assert isinstance(found, RecordedRunConfig)
    return found


def scorers_of(
    found: RecordedRunConfig, policy: LoadedPolicy, algorithm: Algorithm, groups: Any, notes: Recorder
) -> dict[str, Any]:
    """The sources of columns of a run whose data gives ``groups()``."""
    backend = LocalBackend(found, policy)
    source = RecordedSource(config=found, algorithm=algorithm, tracker=notes, train=())
    source.examples, source.validation_groups = cast("Any", SimpleNamespace(read_all=groups)), []
    source.options = TrainOptions(max_steps=1, groups_per_step=1)

    async def build() -> dict[str, Any]:
        made = await backend.build_learners(algorithm, SAMPLING, None)
        columns = await make_columns(found, backend, algorithm, made, notes, await source.make_columns(backend))
        return dict(columns.sources)

    return asyncio.run(build())


def test_a_reference_is_computed_once_and_then_read(tiny_model_folder: Path, tmp_path: Path) -> None:
    found, groups, notes = recorded(tiny_model_folder, tmp_path / "logs"), random_groups(5), Recorder()
    policy = load_policy(found.policy)
    source = scorers_of(found, policy, DPO(), lambda: groups, notes)[REFERENCE_LOGPROBS]
    assert "computed once" in notes.notes[-1]
    batch = pack_for(groups, DPO())
    live = make_learners(found, make_trained_networks(found, policy), DPO(), SAMPLING, None)["policy"].score(batch).logprobs  # type: ignore[union-attr]
    assert torch.allclose(asked(source, batch, groups)[REFERENCE_LOGPROBS], live, atol=1e-6)

    def nobody() -> Sequence[Group]:
        raise AssertionError("the data is not read again")

    again = scorers_of(found, load_policy(found.policy), DPO(), nobody, notes)[REFERENCE_LOGPROBS]
    assert "loaded from" in notes.notes[-1]
    assert torch.equal(asked(again, batch, groups)[REFERENCE_LOGPROBS], asked(source, batch, groups)[REFERENCE_LOGPROBS])


def test_what_a_reference_was_computed_with_must_not_change(tiny_model_folder: Path, tmp_path: Path) -> None:
    found, groups, notes = recorded(tiny_model_folder, tmp_path / "logs"), random_groups(2), Recorder()
    scorers_of(found, load_policy(found.policy), DPO(), lambda: groups, notes)
    changed = load_policy(found.policy)
    with torch.no_grad():
        for parameter in changed.network.model.parameters():
            parameter.add_(0.1)
    with pytest.raises(ValueError, match="were computed with other weights"):
        scorers_of(found, changed, DPO(), lambda: groups, notes)
    other = recorded(tiny_model_folder, tmp_path / "logs", "data.train.system_prompt=Think.")
    with pytest.raises(ValueError, match="were computed with other data"):
        scorers_of(other, load_policy(found.policy), DPO(), lambda: groups, notes)


def test_adapters_leave_a_reference_what_it_is_without_them(tiny_model_folder: Path, tmp_path: Path) -> None:
    groups, notes = random_groups(3), Recorder()
    columns = []
    for name, overrides in (("whole", []), ("adapters", [LORA])):
        found = recorded(tiny_model_folder, tmp_path / name, *overrides)
        source = scorers_of(found, load_policy(found.policy), DPO(), lambda: groups, notes)[REFERENCE_LOGPROBS]
        columns.append(asked(source, pack_for(groups, DPO()), groups)[REFERENCE_LOGPROBS])
    assert torch.allclose(columns[0], columns[1], atol=1e-6)


def test_an_algorithm_without_a_reference_has_none(tiny_model_folder: Path, tmp_path: Path) -> None:
    found = recorded(tiny_model_folder, tmp_path / "logs")
    assert scorers_of(found, load_policy(found.policy), SimPO(), list, Recorder()) == {}
    assert not (tmp_path / "logs").exists()
