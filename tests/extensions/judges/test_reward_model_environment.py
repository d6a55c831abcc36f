"""A trained reward model as a reward: the scores of Transformers, whatever is read together, from one copy of the model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, PromptedTask
from strop.environments.compute_rewards import compute_rewards
from strop.environments.registry import make_environment
from strop.extensions.judges.reward_scorer import RewardScorer, ScorerLimits
from strop.types import Message, Messages, Rollout, assistant, user
from support.models import build
from support.recorded import build_classifier
from support.rollouts import make_rollout, sampled_turn

TALKS: list[Messages] = [
    (user("1+1="), assistant("2")),
    (user("say a long thing"), assistant("the user and the assistant add numbers: what is 12 plus 7?")),
    (Message("system", "be brief"), user("a"), assistant("b"), user("and then?"), assistant("c<|im_end|> and")),
    (user("nothing"), assistant("")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    found = tmp_path_factory.mktemp("reward-model")
    build_classifier("llama", seed=3).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


def environment_of(folder: Path, **options: Any) -> Any:
    return make_environment("reward_model", {"model_name": str(folder), "precision": "float32", "device": "cpu", **options})


def wanted(folder: Path, messages: Messages, *, trailing: bool = False) -> float:
    """As docs/checkpoints.md says that Transformers is asked."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([message.as_dict() for message in messages], tokenize=False)
    text = text if trailing else text.rstrip("\n")
    with torch.no_grad():
        return float(model(**tokenizer([text], return_tensors="pt", add_special_tokens=False)).logits[0, 0])


def rollout(messages: Messages) -> Rollout:
    return replace(make_rollout([1, 2], sampled_turn([3])), messages=messages)


TASK = PromptedTask(id="a", question="q", messages=())


def scores(environment: Environment[Any], talks: list[Messages]) -> list[float]:
    async def run() -> list[float]:
        found = await asyncio.gather(*(compute_rewards(environment, TASK, rollout(talk)) for talk in talks))
        return [each.rewards["score"] for each in found]

    return asyncio.run(run())


@pytest.mark.parametrize("ends", ["answer", "rendering"])
def test_the_reward_is_the_score_that_transformers_gives_the_whole_conversation(ends: str, folder: Path) -> None:
    found = scores(environment_of(folder, ends=ends), TALKS)
    assert found == pytest.approx([wanted(folder, talk, trailing=ends == "rendering") for talk in TALKS], abs=1e-5)
    assert len(set(found)) == len(found)


def test_concurrent_requests_are_read_together_within_the_limits(folder: Path) -> None:
    for limits, batches in (({}, 1), ({"batch_size": 3}, 2), ({"batch_tokens": 1}, 4)):
        environment = environment_of(folder, wait_ms=200.0, **limits)
        before = environment.load_scorer().scorer.batches
        found = scores(environment, TALKS)
        assert environment.load_scorer().scorer.batches - before == batches, limits
        assert found == pytest.approx([wanted(folder, talk) for talk in TALKS], abs=1e-5)


def test_copies_of_the_environment_share_one_model(folder: Path) -> None:
    one, other = environment_of(folder), environment_of(folder, scale=2.0)
    assert one.load_scorer() is other.load_scorer()
    assert scores(other, TALKS[:1])[0] == pytest.approx(2 * scores(one, TALKS[:1])[0], rel=1e-5)


def test_scores_stay_within_the_bounds_that_are_set(folder: Path) -> None:
    free = scores(environment_of(folder), TALKS)
    low, high = sorted(free)[1:3]
    assert scores(environment_of(folder, min_score=low, max_score=high), TALKS) == pytest.approx(
        [min(max(value, low), high) for value in free], abs=1e-5
    )


def test_a_conversation_that_is_too_long_loses_its_beginning_and_that_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = environment_of(folder, max_length=9, wait_ms=1.0)
    (found,) = scores(environment, [TALKS[1]])
    judge = environment.load_scorer()
    tokens = judge.template.encode_conversation(TALKS[1], trailing=False)
    assert found == pytest.approx(float(judge.scorer.score_batch([tokens[-9:]])[0]), abs=1e-5)
    assert "is truncated on the left" in caplog.text


# --- what is refused, and what goes wrong ------------------------------------------------------------------------------------------


def test_a_language_model_is_refused_when_tasks_are_made(tiny_model_folder: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"no trained score layer.*strop rm"):
        environment_of(tiny_model_folder).tasks(DataSource())


def test_a_classifier_with_several_labels_and_a_missing_folder_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import LlamaForSequenceClassification

    config = build("llama").config
    config.num_labels = 3
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(EnvironmentConfigError, match=r"^the reward model: model_name: .*3 labels"):
        environment_of(tmp_path).load_scorer()
    with pytest.raises(EnvironmentConfigError, match="model_name"):
        environment_of(tmp_path / "nowhere").load_scorer()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"wait_ms": -1.0}, "wait_ms is -1"),
        ({"min_score": 1.0, "max_score": 1.0}, "min_score is 1.0 and max_score is 1.0"),
        ({"precision": "float16"}, "precision"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        environment_of(folder, **options)


def test_a_batch_that_fails_is_its_callers_error_and_the_next_is_read() -> None:
    scorer = RewardScorer(build_classifier("llama"), limits=ScorerLimits(wait=0.2))

    async def run() -> list[Any]:
        bad = await asyncio.gather(scorer.score([10**6]), scorer.score([5]), return_exceptions=True)
        return [*bad, await scorer.score([5, 6])]

    first, second, third = asyncio.run(run())
    assert isinstance(first, IndexError) and isinstance(second, IndexError) and isinstance(third, float)
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(scorer.score([]))


def test_a_caller_that_went_away_is_passed_over() -> None:
    scorer = RewardScorer(build_classifier("llama"), limits=ScorerLimits(wait=0.3))

    async def run() -> float:
        gone, stays = asyncio.ensure_future(scorer.score([4])), asyncio.ensure_future(scorer.score([5, 6]))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert asyncio.run(run()) == pytest.approx(float(scorer.score_batch([[5, 6]])[0]), abs=1e-6)


def test_reward_models_are_rewards_among_others_and_several_may_be_asked(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    build_classifier("llama", seed=8).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = {"verifier": "reward_model", "precision": "float32", "device": "cpu"}
    rewards = {
        "first": {**model, "model_name": str(folder)},
        "second": {**model, "model_name": str(tmp_path), "weight": 0.5, "scale": 2.0},
        "steps": {**model, "model_name": str(folder), "per_turn": True, "gate": {"reward": "brief", "otherwise": None}},
        "brief": {"verifier": "regex", "pattern": "never written"},
    }
    environment = make_environment("reward_function", {"rewards": rewards})
    scored = asyncio.run(compute_rewards(environment, TASK, rollout(TALKS[0])))
    first, second = wanted(folder, TALKS[0]), wanted(tmp_path, TALKS[0])
    assert scored.rewards == pytest.approx({"first": first, "second": 2 * second, "brief": 0.0}, rel=1e-4) and first != second
    assert scored.reward == pytest.approx(first + second, rel=1e-4)


def test_a_wrong_reward_model_among_other_rewards_is_an_error_when_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1?"}))
    missing = {"verifier": "reward_model", "model_name": str(tmp_path / "missing")}
    environment = make_environment("reward_function", {"rewards": {"score": missing}})
    with pytest.raises(EnvironmentConfigError, match="missing"):
        environment.tasks(DataSource(dataset_name=str(tmp_path / "rows.jsonl")))


def test_layers_on_several_devices_give_the_same_scores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules are placed as the map says; all of them on the CPU, which is the only device here."""
    import accelerate

    placed: list[Any] = []
    dispatch = accelerate.dispatch_model
    monkeypatch.setattr(
        accelerate, "dispatch_model", lambda model, device_map: placed.append(device_map) or dispatch(model, device_map)
    )
    for device_map in ("balanced", {"model": "cpu", "score": "cpu"}):
        environment = environment_of(folder, device="auto", device_map=device_map)
        for messages in TALKS[:2]:
            assert asyncio.run(environment.rate(messages)) == pytest.approx(wanted(folder, messages), rel=1e-4)
    assert placed == [{"": "cpu"}, {"model": "cpu", "score": "cpu"}]
    with pytest.raises(EnvironmentConfigError, match="the reward model: "):
        environment_of(folder, device="auto", device_map={"model": "cpu"}).load_scorer()
    with pytest.raises(EnvironmentConfigError, match="leave device out"):
        environment_of(folder, device_map="balanced")
