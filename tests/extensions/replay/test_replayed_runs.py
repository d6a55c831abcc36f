"""Steps of runs of every kind are replayed to the last digit, and the terms of their tokens sum to the logged loss."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import train_to_end
from strop.cli.commands import main
from strop.extensions.replay import replay as replay_module
from strop.extensions.replay.replay import ReplayResult, replay
from strop.extensions.replay.replayed_step import ReplayedStep
from strop.extensions.replay.token_ledger import TokenLedger, make_ledger
from strop.extensions.view.view_routes import ViewOptions, ViewServer
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.view_client import asking

STEPS = 6
EVERY = {"checkpointing__save_period": 1, "checkpointing__keep_top_k": None, "logger__token_columns": "all"}
SUMS = {  # rewards that do not always vary, so that DAPO drops groups
    "data__train__env_name": "arithmetic",
    "data__validation__env_name": "arithmetic",
    "env__arithmetic__max_operand": 3,
    "env__arithmetic__wording": "{expression}=",
    "env__graded__type": ...,
}
TEN_STEPS = ("grpo", "gspo", "ppo", "dpo", "sft")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"loss_fn__reference_policy_kl_penalty": 0.1}),
    "gspo": ("grpo", {"algorithm__name": "gspo", "policy__train_global_batch_size": 16}),
    "dapo": ("grpo", {"algorithm__name": "dapo", **SUMS}),
    "ppo": ("ppo", {"policy__train_global_batch_size": 16, "ppo__ppo_epochs": 2}),
    "dpo": ("dpo", {}),
    "sft": ("sft", {}),
    "rm": ("rm", {}),
    "distillation": ("distillation", {}),
    "remax": ("grpo", {"algorithm__name": "remax"}),
    "sampling_mask": (
        "grpo",
        {"policy__generation__top_p": 0.9, "policy__generation__top_k": 20, "policy__generation__keep_sampling_mask": True},
    ),
    "adapted_kl": ("ppo", {"algorithm__kwargs": {"kl": {"weight": 0.1, "place": "token_reward", "target": 0.05, "horizon": 64}}}),
    "asynchronous": ("grpo", {"grpo__async_grpo__enabled": True, "grpo__async_grpo__max_trajectory_age_steps": 2}),
    "stale groups dropped": (
        "grpo",
        {**SUMS, "algorithm__name": "dapo", "grpo__async_grpo__enabled": True, "grpo__async_grpo__order": "drop_too_old"},
    ),
    "unscored": ("grpo", {"env__graded__unscored": 3, "data__curriculum__name": "success_rate"}),
    "averaged": ("grpo", {"policy__ema__enabled": True}),
    "adapters": ("grpo", {"policy__dtensor_cfg__lora_cfg__enabled": True, "policy__dtensor_cfg__lora_cfg__dim": 4}),
    "draft head": ("grpo", {"policy__draft__enabled": True}),
    "exact on policy": ("grpo", {"policy__exact_on_policy": True}),
    "bfloat16": ("grpo", {"policy__precision": "bfloat16", "policy__dtensor_cfg__activation_checkpointing": True}),
    "measured budget": ("grpo", {"policy__train_micro_batch_size": ..., "policy__sequence_packing__train_mb_tokens": "auto"}),
    "stored reference": ("dpo", {"dpo__precompute_reference": True}),
    "unpaired": ("dpo", {"algorithm__name": "kto"}),
    "streamed": ("sft", {"data__train__streaming": True}),
}


def run_kind(name: str, model: Path, folder: Path, **changes: Any) -> Path:
    section, own = KINDS[name]
    folder.mkdir(exist_ok=True)
    train_to_end(
        section, model, folder, **{f"{section}__max_num_steps": STEPS, f"{section}__val_period": 0, **EVERY, **own, **changes}
    )
    return folder / "logs"


def logged(logs: Path, step: int) -> dict[str, float]:
    lines = map(json.loads, (logs / "metrics.jsonl").read_text().splitlines())
    return {name: value for line in lines if line["step"] == step for name, value in line.items()}


def sum_of_terms(logs: Path, step: int, learner: str) -> float:
    """Sum the terms over every rollout of a step."""
    keys = RolloutStore(logs, "none").read_keys(step)
    ledgers = [make_ledger(logs, step, group, sample) for group, sample, _ in keys]
    return math.fsum(value for each in ledgers for name, value in each.totals.items() if ("/" in name) == (learner != "policy"))


def make_first_ledger(logs: Path, step: int) -> TokenLedger:
    group, sample, _ = next(iter(RolloutStore(logs, "none").read_keys(step)))
    return make_ledger(logs, step, group, sample)


def read_viewed_ledger(logs: Path, step: int) -> dict[str, float]:
    """Return the sums of the terms of a step's first rollout, as the page of ``strop view`` asks for them."""
    group, sample, _ = next(iter(RolloutStore(logs, "none").read_keys(step)))
    with asking(ViewServer([logs], ViewOptions(token=None), lambda text: {})) as client:
        (run,) = client.get("/api/runs").json()
        answer = client.get(f"/api/runs/{run['id']}/ledger/{step}/{group}/{sample}")
        missing = client.get(f"/api/runs/{run['id']}/ledger/{step}/9999/0")
    assert missing.status_code == 404 and "stored no rollout" in missing.json()["error"]
    totals: dict[str, float] = answer.json()["totals"]
    return totals


def replay_steps(logs: Path, monkeypatch: pytest.MonkeyPatch, *steps: int) -> list[ReplayResult]:
    monkeypatch.chdir(logs.parent)  # data is named relative to it
    return [asyncio.run(replay(logs, step)) for step in steps]


def test_steps_are_replayed_to_the_last_digit_and_the_ledger_sums_to_the_loss(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = run_kind("gspo", tiny, tmp_path, grpo__max_num_steps=4, checkpointing__save_period=2)
    assert sum_of_terms(logs, 2, "policy") == pytest.approx(logged(logs, 2)["train/loss"], abs=1e-6)
    assert read_viewed_ledger(logs, 2) == pytest.approx(make_first_ledger(logs, 2).totals)
    monkeypatch.chdir(tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    result = asyncio.run(replay(logs, 1))
    assert not result.reproduction.different and result.reproduction.compared > 40
    assert result.weights == "the initial model"
    assert main(["replay", "logs", "--step", "3", "policy.optimizer.kwargs.lr=0.006", "--json", "--no-store"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == "step_2"
    assert not found["reproduction"]["different"] and found["reproduction"]["compared"] > 40
    assert found["gradient_cosine"] == pytest.approx(1.0) and found["change_ratio"] == pytest.approx(2.0, abs=0.1)
    assert found["changed"]["metrics"]["train/lr"] == 0.006
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before, "a replay wrote into the run"


@pytest.mark.exhaustive
def test_a_step_with_rollouts_that_cannot_be_scored_is_the_same_however_it_is_cut_and_replayed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {"policy__train_micro_batch_size": ..., "policy__sequence_packing__train_mb_tokens": 64}
    whole, cut = (
        run_kind("unscored", tiny, tmp_path / name, grpo__max_num_steps=2, grpo__val_period=2, **own)
        for name, own in (("whole", {}), ("cut", budgets))
    )
    found = [logged(logs, step) for logs in (whole, cut) for step in (1, 2)]
    assert all(metrics["train/unscored"] > 0 and "train/curriculum/never_seen" in metrics for metrics in found)
    assert found[1]["validation/unscored"] > 0 and found[1]["validation/errors"] == 0
    for one, other in zip(found[:2], found[2:], strict=True):
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4, abs=1e-6)
    assert sum_of_terms(cut, 2, "policy") == pytest.approx(logged(cut, 2)["train/loss"], abs=1e-6)
    (result,) = replay_steps(cut, monkeypatch, 2)
    assert not result.failed and result.reproduction.compared > 10


def add_noise(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Let each pass of a step compute metrics that are off by a factor, as on a device whose kernels add in the order of arrival."""
    passes, train = iter(factors), replay_module.replay_step

    async def train_with_noise(*arguments: Any) -> ReplayedStep:
        found = await train(*arguments)
        factor = next(passes)
        return replace(found, metrics={name: value * factor for name, value in found.metrics.items()})

    monkeypatch.setattr(replay_module, "passes_may_differ", lambda config: True)
    monkeypatch.setattr(replay_module, "replay_step", train_with_noise)


@pytest.mark.exhaustive
def test_where_equal_passes_differ_only_what_differs_by_more_is_a_fault(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_kind("gspo", tiny, tmp_path, grpo__max_num_steps=3, checkpointing__save_period=2)
    for factors, code, said in (
        ((1.0001, 0.9999), 0, "none differs by more than that"),
        ((1.1, 1.1001), 1, "by more than that differ: train/"),
        ((1.0, 1.0001), 0, "logged metrics are reproduced to the last digit"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            add_noise(patch, *factors)
            assert main(["replay", "logs", "--step", "3", "--no-store"]) == code, factors
        output = capsys.readouterr()
        assert said in output.out and "the step is trained a second time, to see by how much" in output.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_steps_of_every_kind_of_run_are_replayed_to_the_last_digit_and_their_terms_sum_to_the_logged_losses(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = KINDS[name][0]
    logs = run_kind(name, tiny, tmp_path, **{f"{section}__max_num_steps": 12})
    steps = sorted(random.Random(name).sample(range(1, 13), 10 if name in TEN_STEPS else 3))
    for result in replay_steps(logs, monkeypatch, *steps):
        assert not result.failed and result.reproduction.compared > 10, (result.step, name)
    for step in range(1, 13):
        metrics = logged(logs, step)
        assert sum_of_terms(logs, step, "policy") == pytest.approx(metrics["train/loss"], abs=1e-6), step
        if name == "ppo":
            assert sum_of_terms(logs, step, "value") == pytest.approx(metrics["train/value_loss"], abs=1e-6), step


@pytest.mark.exhaustive
def test_steps_that_read_images_are_replayed_to_the_last_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in prompts and in observations, from the files beside the rollouts."""
    from loop import shown as environment
    from support.vision_models import save_vision_model

    model = save_vision_model("qwen2_5_vl", tmp_path / "model")
    shown = {"data__train__env_name": "shown", "data__validation__env_name": "shown", "env__graded__type": ...}
    own = {
        "policy__max_total_sequence_length": 160,
        "grpo__max_rollout_turns": 2,
        "env__shown__type": f"{Path(environment.__file__)}:Shown",
        "env__shown__turns": 2,
    }
    logs = run_kind("grpo", model, tmp_path, **shown, **own)
    for result in replay_steps(logs, monkeypatch, 1, 4, 6):
        assert not result.failed and result.reproduction.compared > 40, result.step


@pytest.mark.exhaustive
def test_steps_with_the_experts_of_the_rollouts_are_replayed_to_the_last_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loop.test_router_replay_runs import build_mixture

    mixture = build_mixture(tmp_path / "mixture")
    own = {"policy__router_replay__enabled": True}
    logs = run_kind("grpo", mixture, tmp_path, logger__routes=True, **own)
    for result in replay_steps(logs, monkeypatch, 1, 4, 6):
        assert not result.failed and result.as_it_was.metrics["train/tokens_without_routes"] == 0.0, result.step
    other = run_kind("grpo", mixture, tmp_path / "without", grpo__max_num_steps=1, **own)
    assert main(["replay", str(other), "--step", "1"]) == 2
    assert "set logger.routes=true in a run whose steps are to be replayed" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_step_of_a_run_that_went_on_with_other_settings_has_those_that_it_ran_with(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is trained twice, as after a kill; the second time with another learning rate."""
    run_kind("grpo", tiny, tmp_path, grpo__max_num_steps=3)
    shutil.rmtree(tmp_path / "results" / "step_3")
    logs = run_kind("grpo", tiny, tmp_path, policy__optimizer__kwargs__lr=0.001)
    for result in replay_steps(logs, monkeypatch, 2, 3, 5):
        assert not result.failed, result.step
        assert result.as_it_was.metrics["train/lr"] == (0.003 if result.step < 3 else 0.001)


@pytest.mark.exhaustive
def test_what_cannot_be_replayed_is_refused_with_what_can(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_kind("grpo", tiny, tmp_path, checkpointing__save_period=3)
    monkeypatch.chdir(tmp_path)

    def refusal(*arguments: str) -> str:
        assert main(["replay", "logs", *arguments]) == 2
        return capsys.readouterr().err

    assert "steps that can be replayed exactly: 1, 4" in refusal("--step", "3")
    assert "has not trained step 9" in refusal("--step", "9")
    assert "this cannot be changed" in refusal("--step", "4", "grpo.num_prompts_per_step=2")
    assert "there is no such key" in refusal("--step", "4", "loss_fn.ratio_clip_mx=3")
    assert "greedy rollout" in refusal("--step", "4", "algorithm.name=remax")
