"""Runs whose rewards are the scores of a reward model."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.kinds import SUMS, sampling_config, write_rows
from loop.runs import Environ, metrics_of, overrides, start
from loop.test_cluster_runs import RAY, curves_agree
from loop.victims import MARK, find_processes
from strop import cli
from strop.models.loading import load_tokenizer
from strop.models.value_network import load_classifier

STEPS = 3


def test_a_folder_without_a_reward_model_is_named_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["env={judge: {type: reward_model}}", "data.train={env_name: judge, dataset_name: gsm8k}"]
    off = ["grpo.val_period=0", "checkpointing.metric_name=null", "policy.device=cpu"]
    words = [*rows, *off, "policy.model_name=m", "env.judge.model_name=results/rm/step_9/policy/weights"]
    assert cli.main(["grpo", *words, "--dry-run"]) == 2
    assert "env.judge.model_name: there is no folder results/rm/step_9/policy/weights" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_reward_model_in_a_process_of_its_own_gives_the_curve_of_one_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    judge = reward_model(tmp_path / "judge", tiny_model_folder)
    rows = write_rows(tmp_path / "rows.jsonl", [{"problem": f"{a}+{b}=", "answer": ""} for a, b in SUMS])
    settings = {
        **sampling_config("grpo", tiny_model_folder),
        "grpo.max_num_steps": STEPS,
        "grpo.val_period": 0,
        "checkpointing.enabled": False,
        "data.train.dataset_name": str(rows),
        "data.train.env_name": "judged",
        "data.validation.dataset_name": str(rows),
        "data.validation.env_name": "judged",
        "env.judged.type": "reward_model",
        "env.judged.model_name": str(judge),
        "env.judged.precision": "float32",
    }
    for name, more in (("one", {}), ("apart", {**RAY, "cluster.environment_hosts": 1})):
        outcome = start(
            ["grpo", *overrides({**settings, **more})], tmp_path / name, before=Environ({MARK: str(tmp_path)})
        ).finish(300)
        assert outcome.code == 0, outcome.err + outcome.out
    curves_agree(tmp_path / "one", tmp_path / "apart", steps=STEPS)
    metrics = metrics_of(tmp_path / "one" / "logs")[STEPS]
    assert metrics["train/reward"] != 0.0 and metrics["train/grad_norm"] > 0.0
    assert find_processes(str(tmp_path)) == []


def reward_model(folder: Path, tiny: Path) -> Path:
    """As ``strop rm`` saves one, untrained: another tokenizer than the policy's is not needed for this."""
    tokenizer, model = load_tokenizer(str(tiny)), load_classifier(str(tiny), seed=2, init_std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
