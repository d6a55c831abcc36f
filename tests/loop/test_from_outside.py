"""A new algorithm and a new environment, each one file outside the package: the examples of the docs, trained with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
WITHOUT_ARITHMETIC = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "grpo.val_period": 0,
    "checkpointing.metric_name": None,
    "grpo.max_num_steps": 3,
}


def examples(page: str) -> dict[str, str]:
    """The Python blocks of a page by the file name in their first line."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def trained(tiny: Path, folder: Path, page: str, file: str, **changes):
    """A run with one example of the docs in its folder; its metrics and rollouts."""
    (folder / file).write_text(examples(page)[file])
    outcome = grpo(tiny, folder, **changes)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(folder / "logs")
    assert list(metrics) == [1, 2, 3]
    return metrics, list(RolloutStore(folder / "logs").read_all())


@pytest.mark.parametrize(
    ("file", "name", "kwargs", "tag"),
    [
        ("max_rl.py", "MaxRL", {"floor": 0.1}, "train/ratio_capped"),
        ("brief.py", "Brief", {"price": 0.5}, "train/kl_penalty"),
    ],
)
def test_the_algorithm_of_the_docs_trains(tiny, tmp_path, file, name, kwargs, tag):
    metrics, records = trained(
        tiny,
        tmp_path,
        "algorithms/custom.md",
        file,
        **{"algorithm.name": f"{file}:{name}", "algorithm.kwargs": kwargs, "grpo.max_num_steps": 3, "grpo.update_epochs": 2},
        **{"loss_fn.reference_policy_kl_penalty": 0.01 if tag == "train/kl_penalty" else 0.0},
    )
    assert all(tag in line and line["train/grad_norm"] > 0 for line in metrics.values())
    rewards: dict[int, list[float]] = {}
    for record in records:
        rewards.setdefault(record.group, []).append(record.reward)
    for record in records:
        mean = sum(rewards[record.group]) / 8
        if name == "MaxRL" and record.kept:
            assert record.advantage == pytest.approx((record.reward - mean) / max(mean, 0.1), rel=1e-5)
            assert 0 < mean < 1, "groups that do not vary were dropped"
    if name == "Brief":
        idle = [record for record in records if sum(rewards[record.group]) == 0]
        longest = {group: max(len(r.tokens) for r in idle if r.group == group) for group in {r.group for r in idle}}
        assert idle
        for record in idle:
            assert record.advantage == pytest.approx(-0.5 * len(record.tokens) / longest[record.group], rel=1e-5)


def test_an_algorithm_is_found_as_a_module_in_the_working_directory(tiny, tmp_path):
    trained(tiny, tmp_path, "algorithms/custom.md", "max_rl.py", **{"algorithm.name": "max_rl:MaxRL", "grpo.max_num_steps": 3})


def test_the_environment_of_the_docs_is_trained_on(tiny, tmp_path):
    changes = {"data.train.env_name": "words", "env.words.type": "reversal.py:Reversal", "env.words.letters": 3}
    more = {"policy.max_total_sequence_length": 160, "data.max_input_seq_length": 150, "env.words.reward_weights": {"brief": 0.5}}
    metrics, records = trained(tiny, tmp_path, "environments.md", "reversal.py", **WITHOUT_ARITHMETIC, **changes, **more)
    assert {"train/rewards/correct", "train/rewards/brief", "train/rewards/characters"} <= metrics[1].keys()
    for record in records:
        assert record.environment == "words"
        assert record.reward == pytest.approx(record.rewards["correct"] + 0.5 * record.rewards["brief"])


def test_the_multi_turn_environment_of_the_docs_is_trained_on(tiny, tmp_path):
    changes = {
        "data.train.env_name": "guess",
        "env.guess.type": "guess.py:GuessTheNumber",
        "env.guess.highest": 20,
        "grpo.max_rollout_turns": 3,
        "policy.max_total_sequence_length": 400,
        "data.max_input_seq_length": 150,
        "policy.generation.max_new_tokens": 6,
        "policy.generation.stop_strings": ["7", "1"],
    }
    metrics, records = trained(tiny, tmp_path, "environments.md", "guess.py", **WITHOUT_ARITHMETIC, **changes)
    assert metrics[3]["train/turns_per_sample"] > 1
    several = [record for record in records if not all(record.sampled)]
    assert several, "some conversations went on"
    for record in several:
        assert not any("<|im_start|>" in turn.text for turn in record.turns if not turn.sampled)
        for sampled, version, logprob in zip(record.sampled, record.versions, record.sampler_logprobs, strict=True):
            assert (version == record.step - 1) if sampled else (version == -1 and logprob == 0)
        assert record.learner_logprobs == pytest.approx(record.sampler_logprobs, abs=1e-4)
    assert all(line["train/token_mult_prob_error"] < 1.0001 for line in metrics.values())


def test_a_session_of_the_docs_lives_as_long_as_its_episode(tiny, tmp_path):
    changes = {
        "data.train.env_name": "notes",
        "env.notes.type": "notes.py:Notes",
        "env.notes.pages": 2,
        "grpo.max_rollout_turns": 2,
        "policy.max_total_sequence_length": 200,
        "data.max_input_seq_length": 150,
        "policy.generation.stop_strings": ["1", "2", "3"],
    }
    _, records = trained(tiny, tmp_path, "environments.md", "notes.py", **WITHOUT_ARITHMETIC, **changes)
    assert all(record.error is None for record in records)
    assert {record.reward for record in records} <= {0.0, 1.0, 2.0} and any(record.reward == 2 for record in records)
