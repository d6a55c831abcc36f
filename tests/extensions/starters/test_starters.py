"""What ``strop init`` writes is trained with, by the tiny model: every kind, two steps."""

from __future__ import annotations

import re
from asyncio import run
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loop.runs import metrics_of, strop
from strop.data.sources.source import DataSource
from strop.environments.compute_rewards import compute_rewards
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.extensions.starters.init_command import FOLDER
from strop.tools.base import ParsedReply
from strop.tools.toolbox import METRICS
from strop.types import Rollout, ToolCall, Turn
from support.sweep import sweep

pytestmark = pytest.mark.slow

SMALL = ["policy.device=cpu", "policy.precision=float32", "policy.max_total_sequence_length=500", "checkpointing.save_period=2"]


def sampled(section: str) -> list[str]:
    return [
        f"{section}.max_num_steps=2",
        f"{section}.num_prompts_per_step=2",
        f"{section}.num_generations_per_prompt=2",
        f"{section}.val_period=2",
        f"{section}.max_val_samples=2",
        "policy.generation.max_new_tokens=8",
        "policy.generation.torch_cfg.kv_cache_memory_gb=0.01",
    ]


RUNS = {
    **{kind: ("grpo", kind.replace("-", "_"), sampled("grpo")) for kind in ("grpo", "multi-turn", "agent")},
    "tools": ("grpo", "tools", [*sampled("grpo"), "policy.max_total_sequence_length=1100"]),
    "ppo": ("ppo", "ppo", [*sampled("ppo"), "ppo.policy_training_start_step=1"]),
    "distillation": ("distillation", "distillation", [*sampled("distillation"), "teacher.model_name=${policy.model_name}"]),
    **{kind: (kind, kind, [f"{kind}.max_num_steps=2", f"{kind}.val_period=2"]) for kind in ("sft", "dpo", "rm")},
}


def warnings_of(text: str) -> list[str]:
    """The warnings of a run, except that others use its cores."""
    return [line for line in text.splitlines() if line.startswith("warning: ") and "other processes" not in line]


@pytest.mark.parametrize("kind", sweep(RUNS, "tools", "dpo"))
def test_a_starter_trains_as_it_is_written_and_ends_with_its_score(kind: str, tiny: Path, tmp_path: Path) -> None:
    command, name, changes = RUNS[kind]
    assert strop("init", kind, "--model", str(tiny), folder=tmp_path).code == 0
    outcome = strop(command, "--config", f"{name}.yaml", *SMALL, "logger.console=plain", *changes, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not warnings_of(outcome.err)
    begin = r"0\.\d+ \[0\.\d+, [01]\.\d+\] after step 0, " if kind != "dpo" else ""
    scored = rf"held out    accuracy {begin}[01]\.\d+ \[.*\] after step 2 \(\d+ tasks, 95 % intervals\)"
    assert bool(re.search(scored, outcome.out)) == (kind != "sft"), outcome.out
    metrics = metrics_of(tmp_path / "logs" / name)
    validated = {1, 2} if kind == "dpo" else {0, 1, 2}
    assert set(metrics) == validated and any(tag.startswith("validation/") for tag in metrics[2])
    assert (tmp_path / "results" / name / "step_2" / "policy" / "weights" / "config.json").is_file()


@pytest.mark.exhaustive
def test_the_recorded_calls_of_the_starter_are_trained_on_and_its_models_are_evaluated(tiny: Path, tmp_path: Path) -> None:
    for kind in ("tools", "sft"):
        assert strop("init", kind, "--model", str(tiny), folder=tmp_path).code == 0
    recorded = [*SMALL, "policy.max_total_sequence_length=1100", "sft.max_num_steps=1", "sft.val_period=0"]
    recorded += ["checkpointing.metric_name=null"]
    for name in ("tools_sft", "sft"):
        outcome = strop("sft", "--config", f"{name}.yaml", *recorded, folder=tmp_path)
        assert outcome.code == 0 and not warnings_of(outcome.err), outcome.err
    model = "generation.model_name=results/sft/step_1/policy/weights"
    outcome = strop("eval", "--config", "eval.yaml", model, "generation.vllm_cfg.max_model_len=500", folder=tmp_path)
    assert outcome.code == 0 and "95 % confidence interval" in outcome.out, outcome.err


def test_the_tool_of_the_starter_computes_and_its_rewards_read_the_rollout() -> None:
    environment = make_environment(
        "reward_function",
        {
            "tools": [f"{FOLDER}/tools.py:calculate"],
            "rewards": {
                "correct": f"{FOLDER}/tools.py:correct",
                "called": {"function": f"{FOLDER}/tools.py:called", "weight": 0.2},
            },
        },
    )
    task = environment.tasks(DataSource(dataset_name=str(FOLDER / "sums.jsonl"), input_key="question", output_key="answer"))[0]

    async def play() -> Rollout:
        one = torch.ones(1)
        turn = Turn(author="policy", tokens=one.long(), text="3,344", logprobs=one, versions=one.int())
        local = LocalEnvironment(environment)
        rollout = Rollout(task=task, sample=0, seed=0, messages=(), prompt=one.long(), metrics=dict.fromkeys(METRICS, 0.0))
        async with local.open(task):
            call = ToolCall("calculate", {"left": 38, "operator": "*", "right": 88}, id="c00000000")
            answers = await local.answer_calls(rollout, ParsedReply("", calls=(call,)))
            assert answers is not None and answers[0].content == "3344"
            rollout = rollout.with_turn(turn, *answers)
            return replace(rollout, reward=(await compute_rewards(environment, task, rollout)).reward)

    assert run(play()).reward == 1.2


def test_the_calculator_of_the_starter_answers_between_the_turns() -> None:
    environment = make_environment(f"{FOLDER}/calculator.py:Calculator", {})
    task = environment.tasks(DataSource(dataset_name=str(FOLDER / "sums.jsonl"), input_key="question", output_key="answer"))[0]
    assert [message.role for message in environment.prompt(task)] == ["system", *["user", "assistant"] * 2, "user"]

    def said(*texts: str) -> Rollout:
        one = torch.ones(1)
        turns = tuple(Turn(author="policy", tokens=one.long(), text=text, logprobs=one, versions=one.int()) for text in texts)
        return Rollout(task=task, sample=0, seed=0, messages=(), prompt=one.long(), turns=turns)

    (answer,) = run(environment.respond(task, said("<calc>38 * 88</calc>")))
    assert answer.content == "3344"
    (refused,) = run(environment.respond(task, said("<calc>__import__('os')</calc>")))
    assert refused.content.startswith("error: a call is")
    done = said("<calc>38 * 88</calc>", "There are 3,344 pens.")
    assert run(environment.respond(task, done)) is None
    result = run(compute_rewards(environment, task, done))
    assert result.rewards == {"correct": 1.0, "asked": 1.0} and result.reward == 1.2
