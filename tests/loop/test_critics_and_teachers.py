"""Runs of the real loop, engine and learners on a tiny model: PPO with a critic, and distillation from a teacher."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.fakes import Recorder, Tasks, make_listeners
from loop.tiny import tiny_model, tiny_tokenizer
from strop.algorithms.base import Algorithm
from strop.algorithms.critic.gae import VALUES, Gae
from strop.algorithms.critic.ppo import PPO
from strop.algorithms.distillation.distillation import TEACHER_LOGPROBS, Distillation
from strop.algorithms.distillation.topk_distillation import TEACHER_CANDIDATES, TopKDistillation
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.environments.handle import LocalEnvironment
from strop.learner.client import AsyncColumnSource, LogprobColumn, PolicyColumns, ScorerClient, ValueColumn
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer, TrainableNetwork, copy_frozen
from strop.learner.torch.teacher import SelfTeacher, TeacherLogprobs, TeacherTopK
from strop.models.chat_template import ChatTemplate
from strop.models.network import Network
from strop.models.value_head import ValueHead
from strop.models.value_network import ValueNetwork
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import RolloutStream
from strop.sampling import Sampling
from strop.trainer.column_sources import ColumnSources
from strop.trainer.run import TrainingRun, TrainOptions
from strop.trainer.train import train
from strop.types import Group, Rollout, Task
from strop.weight_sync.in_process import InProcessWeights
from support.clients import column_client, learner_client, scorer_client
from support.learners import make_torch_learner
from support.torch_engine import make_engine, make_runner

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()
DIGITS = tuple(TOKENIZER.convert_tokens_to_ids(list("0123456789")))
SAMPLING = Sampling(max_new_tokens=5)


@dataclass(frozen=True, kw_only=True)
class Sevens(Environment[Task]):
    """The reward is the share of sevens, and half a point for tasks that are easy: what a critic can tell from the prompt."""

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(1000, lambda index: Task(id=str(index), question="easy" if index % 2 else "hard"))

    @reward(weight=1.0)
    def sevens(self, task: Task, rollout: Rollout) -> float:
        return rollout.text.count("7") / max(len(rollout.text), 1) + 0.5 * (task.question == "easy")


def language_model(seed: int = 0, likely: tuple[int, ...] = DIGITS) -> Network:
    return Network(tiny_model(len(TOKENIZER), seed=seed, likely=(*likely, TOKENIZER.eos_token_id)))


def own_critic(policy: Network) -> TrainableNetwork:
    """A sequence classifier on a copy of the policy's trunk."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.base_model.load_state_dict(policy.model.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return ValueNetwork(model)


def learner_on(network: TrainableNetwork, rate: float) -> TorchLearner:
    return make_torch_learner(network, SAMPLING, optimizer_kwargs={"lr": rate, "weight_decay": 0.0}, train_tokens=200)


def frozen(network: Network) -> ScorerClient:
    return scorer_client(NetworkScorer(copy_frozen(network), SAMPLING, 500))


def run_of(
    folder: Path,
    policy: Network,
    algorithm: Algorithm,
    scorers: Mapping[str, AsyncColumnSource],
    *,
    steps: int,
    critic: TorchLearner | None = None,
    samples: int = 4,
    groups: int = 6,
    rate: float = 3e-3,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """What was logged, step by step."""
    engine = make_engine(make_runner(policy, slots=24, length=64), TOKENIZER, stop_ids=[TOKENIZER.eos_token_id])
    environment, template = Sevens(), ChatTemplate(TOKENIZER)
    source = Tasks(LocalEnvironment(environment), environment.tasks(DataSource()))
    rules = EpisodeRules(max_length=64)

    async def group(index: int) -> Group:
        name, env, task = source.at(index)
        return await run_group(
            index, name, env, task,
            samples=samples, generator=engine, template=template, sampling=SAMPLING, rules=rules, seed=7,
        )  # fmt: skip

    staleness = options.get("max_staleness", 0)
    learners = {"policy": learner_on(policy, rate), **({} if critic is None else {"value": critic})}
    clients = {name: learner_client(learner) for name, learner in learners.items()}
    run = TrainingRun(
        options=TrainOptions(max_steps=steps, groups_per_step=groups, **options),
        algorithm=algorithm,
        stream=RolloutStream(group, slots=(staleness + 1) * groups, size=None, refill_on_release=staleness > 0),
        learners=clients,
        columns=ColumnSources(algorithm.requires, {POLICY_LOGPROBS: PolicyColumns(clients["policy"]), **scorers}),
        weights=InProcessWeights([engine]),
        tracker=(tracker := Recorder()),
        listeners=make_listeners(RolloutStore(folder, "none"), algorithm),
    )

    async def trained() -> None:
        try:
            await train(run)
        finally:
            await engine.close()

    asyncio.run(trained())
    return tracker.steps


def mean(logged: Mapping[int, Mapping[str, float]], name: str, steps: Sequence[int]) -> float:
    return sum(logged[step][name] for step in steps) / len(steps)


@pytest.mark.parametrize(
    ("critic", "rate"),
    [pytest.param(own_critic, 3e-3, marks=pytest.mark.exhaustive), pytest.param(ValueHead, 3e-2, marks=pytest.mark.exhaustive)],
    ids=["a critic of its own", "a head on the policy"],
)
def test_ppo_learns_and_its_critic_explains_variance(
    tmp_path: Path, critic: Callable[[Network], TrainableNetwork], rate: float
) -> None:
    """Four optimizer steps on each batch; a group is a single rollout, whose baseline is the critic alone."""
    policy = language_model()
    value = learner_on(critic(policy), rate)
    kl = Kl(weight=0.01, estimator="k1", place="token_reward")
    algorithm = PPO(kl=kl, advantage=Gae(lambda_value=1.0), policy_training_start_step=3)
    scorers = {
        VALUES: ValueColumn(VALUES, scorer_client(value)),
        REFERENCE_LOGPROBS: LogprobColumn(REFERENCE_LOGPROBS, frozen(policy)),
    }
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    logged = run_of(
        tmp_path, policy, algorithm, scorers, critic=value, steps=40, samples=1, groups=24, update_epochs=2, steps_per_batch=2
    )
    first, last = range(1, 4), range(36, 41)
    assert not any(name.startswith("train/probs_ratio") for step in first for name in logged[step]), "the policy waits"
    assert "train/probs_ratio" in logged[4]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert mean(logged, "train/reward", last) > mean(logged, "train/reward", first) + 0.15
    assert logged[1]["train/explained_variance"] == pytest.approx(0, abs=0.2)
    assert mean(logged, "train/explained_variance", last) > 0.3
    assert mean(logged, "train/value_loss", last) < mean(logged, "train/value_loss", first)
    assert {"train/values_mean", "train/returns_mean", "train/value_grad_norm", "train/value_lr", "train/kl_penalty"} <= set(
        logged[40]
    )


@pytest.mark.exhaustive
def test_ppo_learns_from_rollouts_that_ran_ahead(tmp_path: Path) -> None:
    policy = language_model()
    value = learner_on(ValueHead(policy), 3e-2)
    logged = run_of(
        tmp_path,
        policy,
        PPO(),
        {VALUES: ValueColumn(VALUES, scorer_client(value))},
        critic=value,
        steps=30,
        max_staleness=1,
        update_epochs=2,
    )
    assert logged[30]["train/staleness_max"] == 1.0
    assert mean(logged, "train/reward", range(26, 31)) > mean(logged, "train/reward", range(1, 4)) + 0.15


@pytest.mark.exhaustive
def test_distillation_brings_the_student_to_its_teacher(tmp_path: Path) -> None:
    """By the advantage of sampled tokens; rewards make no difference."""
    teacher = NetworkScorer(language_model(seed=1, likely=(*DIGITS, *DIGITS[7:])), SAMPLING, 500)
    student = language_model()
    logged = run_of(
        tmp_path,
        student,
        Distillation(),
        {TEACHER_LOGPROBS: column_client(TeacherLogprobs(teacher))},
        steps=40,
        samples=8,
        groups=8,
        rate=5e-3,
    )
    assert mean(logged, "train/teacher_kl", range(38, 41)) < 0.5 * mean(logged, "train/teacher_kl", range(1, 4))


@pytest.mark.parametrize(
    "algorithm",
    [
        *(
            pytest.param(TopKDistillation(kl_type=kind), marks=pytest.mark.exhaustive)
            for kind in ("forward", "reverse", "mixed", "jsd")
        ),
        TopKDistillation(kl_type="mixed", outside="renormalise"),
    ],
    ids=lambda algorithm: f"{algorithm.kl_type} {algorithm.outside}",
)
def test_top_k_distillation_brings_the_student_to_its_teacher(tmp_path: Path, algorithm: TopKDistillation) -> None:
    teacher = NetworkScorer(language_model(seed=1, likely=(*DIGITS, *DIGITS[7:])), SAMPLING, 500)
    scorers = {TEACHER_CANDIDATES: column_client(TeacherTopK(teacher, 24))}
    logged = run_of(tmp_path, language_model(), algorithm, scorers, steps=15, rate=5e-3)
    for name in ("train/loss", "train/kl_forward", "train/kl_reverse"):
        assert logged[15][name] < 0.5 * logged[1][name], name
    assert 0 < logged[15]["train/student_mass"] <= 1.0


def test_a_policy_that_is_shown_how_teaches_itself(tmp_path: Path) -> None:
    """Self-distillation: without the demonstration the student comes to write as it does after it."""
    student = language_model()
    demonstration = TOKENIZER("7 77 777 7777", add_special_tokens=False)["input_ids"]
    shown = SelfTeacher(
        TeacherTopK(NetworkScorer(copy_frozen(student), SAMPLING, 500), 24),
        lambda group: [*demonstration, *group.rollouts[0].prompt.tolist()],
    )
    logged = run_of(tmp_path, student, TopKDistillation(), {TEACHER_CANDIDATES: column_client(shown)}, steps=15, rate=3e-3)
    assert logged[1]["train/loss"] > 1e-4
    assert logged[15]["train/loss"] < 0.5 * logged[1]["train/loss"]
