"""Who trains in a run, and who fills the columns that its algorithm requires."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.fakes import Recorder
from strop.algorithms.base import SQUARED_PROBS, Algorithm
from strop.algorithms.critic import PPO, VALUES
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.config import RolloutRunConfig, TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.learner.client import POLICY_ENTROPY
from strop.learner.torch.learner import TorchLearner
from strop.models.value_network import ValueHead, ValueNetwork
from strop.runs.backend import LocalBackend, make_columns
from strop.runs.models import LoadedPolicy, load_policy, make_learners, make_trained_networks
from strop.sampling import Sampling
from strop.trainer.run import TrainOptions
from strop.types import Batch, Group
from support.recorded import random_groups
from support.rollouts import pack_for

SAMPLING = Sampling()
OPTIONS = TrainOptions(max_steps=5, groups_per_step=2, steps_per_batch=2, update_epochs=3)
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


def config(section: str, model: Path, *overrides: str) -> TrainingRunConfig:
    base = [f"policy.model_name={model}", "policy.precision=float32", "policy.device=cpu", f"{section}.val_period=0"]
    if section in ("sft", "dpo", "rm"):
        base.append("data.train.dataset_name=squad")
    else:
        base += ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    return load_config(None, [*base, *overrides], root=TRAINING_RUNS[section]).config


def rollouts(section: str, model: Path, *overrides: str) -> RolloutRunConfig:
    found = config(section, model, *overrides)
    assert isinstance(found, RolloutRunConfig)
    return found


def learners(config: TrainingRunConfig, policy: LoadedPolicy, algorithm: Algorithm) -> dict[str, TorchLearner]:
    return make_learners(config, make_trained_networks(config, policy), algorithm, SAMPLING, OPTIONS.count_optimizer_steps(None))


def backend_with_scorers(
    config: TrainingRunConfig, policy: LoadedPolicy, algorithm: Algorithm, notes: Recorder | None = None
) -> tuple[LocalBackend, dict[str, Any]]:
    backend = LocalBackend(config, policy)

    async def build() -> dict[str, Any]:
        made = await backend.build_learners(algorithm, SAMPLING, None)
        found = await make_columns(config, backend, algorithm, made, notes or Recorder(), {})
        return dict(found.sources)

    return backend, asyncio.run(build())


def asked(source: Any, batch: Batch, groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    return dict(asyncio.run(source.columns(batch, groups)))


def disturb(policy: LoadedPolicy) -> None:
    """Change every weight that is trained."""
    with torch.no_grad():
        for parameter in policy.network.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


# --- how many optimizer steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_steps", "tasks", "wanted"),
    [
        (5, None, 30),  # five batches of three passes of two steps
        (5, 100, 30),
        (5, 8, 24),  # eight tasks are four batches
        (5, 9, 24),  # the ninth is left over
        (1_000_000, 8, 24),  # the schema's default is no limit
        (1 << 60, 8, 24),
        (1_000_000, None, None),
        (5, 1, 0),
    ],
)
def test_a_schedule_is_as_long_as_steps_and_tasks_allow(max_steps: int, tasks: int | None, wanted: int | None) -> None:
    options = TrainOptions(max_steps=max_steps, groups_per_step=2, steps_per_batch=2, update_epochs=3)
    assert options.count_optimizer_steps(tasks) == wanted


def test_the_run_s_steps_are_the_length_of_a_schedule_that_sets_none(tiny_model_folder: Path) -> None:
    found = config("grpo", tiny_model_folder, "policy.scheduler={name: linear, kwargs: {min_ratio: 0.0}}")
    policy = load_policy(found.policy)
    made = learners(found, policy, GRPO())["policy"]
    assert made.scheduler is not None
    rates = []
    for _ in range(30):
        rates.append(made.optimizer.param_groups[0]["lr"])
        made.optimizer.step()
        made.scheduler.step()
    assert rates[0] > rates[15] > rates[29] > 0 and made.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("unit", "first_batches"), [("batch", [0.1, 0.2, 0.3]), ("optimizer_step", [0.1, 0.5, 0.9])])
def test_a_warm_up_of_ten_lasts_ten_batches_of_four_optimizer_steps(
    unit: str, first_batches: list[float], tiny_model_folder: Path
) -> None:
    batches = ["grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4"]
    schedule = ["policy.scheduler={name: constant, kwargs: {warmup_steps: 10}}", "policy.optimizer.kwargs.lr=1.0"]
    found = config("grpo", tiny_model_folder, *batches, *schedule, f"policy.scheduler_unit={unit}")
    made = learners(found, load_policy(found.policy), GRPO())["policy"]
    rates = []
    for _ in range(12):
        for parameter in made.parameters:
            parameter.grad = torch.zeros_like(parameter)
        rates.append(made.step()["lr"].value)
    assert rates[::4] == pytest.approx(first_batches)


# --- learners ----------------------------------------------------------------------------------------------------------------------


def test_pairs_are_never_cut_where_the_loss_compares_them(tiny_model_folder: Path) -> None:
    DPO = pytest.importorskip("strop.extensions.recorded.preference.referenced").DPO
    found = config("dpo", tiny_model_folder)
    made = learners(found, load_policy(found.policy), DPO())
    assert list(made) == ["policy"] and made["policy"].whole_groups


def test_a_critic_has_the_settings_of_its_own_section(tiny_model_folder: Path) -> None:
    found = rollouts("ppo", tiny_model_folder, "value.optimizer.kwargs.lr=0.5", "value.max_grad_norm=9", "value.device=cpu")
    policy = load_policy(found.policy)
    made: Any = learners(found, policy, PPO())
    assert list(made) == ["policy", "value"] and isinstance(made["value"].network, ValueNetwork)
    assert made["value"].optimizer.param_groups[0]["lr"] == 0.5 and made["value"].config == found.value
    shared = {id(parameter) for parameter in made["policy"].parameters} & {id(one) for one in made["value"].parameters}
    assert not shared, "each learner steps its own weights"


def test_a_mistake_in_the_section_of_a_critic_is_named_with_its_key(tiny_model_folder: Path) -> None:
    momentum = "value.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1, momentun: 0.5}}"
    found = rollouts("ppo", tiny_model_folder, momentum, "value.device=cpu")
    with pytest.raises(ValueError, match=r"^value\.optimizer\.kwargs\.momentun: "):
        learners(found, load_policy(found.policy), PPO())


def test_a_critic_that_is_a_head_trains_nothing_of_the_policy(tiny_model_folder: Path) -> None:
    found = rollouts("ppo", tiny_model_folder, "value.head_only=true")
    policy = load_policy(found.policy)
    made: Any = learners(found, policy, PPO())
    assert isinstance(made["value"].network, ValueHead)
    count = sum(parameter.numel() for parameter in made["value"].parameters)
    assert count < 1000 < sum(parameter.numel() for parameter in made["policy"].parameters)


def test_a_critic_with_another_vocabulary_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    from loop.tiny import build_tiny

    other = build_tiny(tmp_path / "other")
    found = rollouts("ppo", tiny_model_folder, f"value.model_name={other}")
    with pytest.raises(ValueError, match=r"^value\.tokenizer\.name: the critic reads the tokens that the policy wrote"):
        learners(found, load_policy(found.policy), PPO())


def test_a_critic_that_was_saved_without_its_tokenizer_can_be_given_the_policy_s(tiny_model_folder: Path, tmp_path: Path) -> None:
    found = rollouts("ppo", tiny_model_folder)
    made: Any = learners(found, load_policy(found.policy), PPO())
    made["value"].save(tmp_path)
    saved = f"value.model_name={tmp_path / 'weights'}"
    with pytest.raises(ValueError, match=r"value\.tokenizer\.name: no tokenizer could be loaded from .*name the policy's"):
        alone = rollouts("ppo", tiny_model_folder, saved)
        learners(alone, load_policy(alone.policy), PPO())
    given = rollouts("ppo", tiny_model_folder, saved, f"value.tokenizer.name={tiny_model_folder}")
    assert list(learners(given, load_policy(given.policy), PPO())) == ["policy", "value"]


# --- columns -----------------------------------------------------------------------------------------------------------------------


def test_a_reference_is_loaded_only_where_it_is_asked_for(tiny_model_folder: Path) -> None:
    found = rollouts("grpo", tiny_model_folder)
    policy = load_policy(found.policy)
    assert backend_with_scorers(found, policy, GRPO())[1] == {}
    assert backend_with_scorers(found, policy, GRPO(kl=Kl(weight=0.0)))[1] == {}
    assert list(backend_with_scorers(found, policy, GRPO(kl=Kl(weight=0.1)))[1]) == [REFERENCE_LOGPROBS]


@pytest.mark.parametrize("overrides", [[], [LORA]], ids=["a frozen copy", "adapters off"])
def test_the_reference_stays_what_the_policy_was(tiny_model_folder: Path, overrides: list[str]) -> None:
    algorithm = GRPO(kl=Kl(weight=0.1))
    found = rollouts("grpo", tiny_model_folder, *overrides)
    policy = load_policy(found.policy)
    source = backend_with_scorers(found, policy, algorithm)[1][REFERENCE_LOGPROBS]
    groups = random_groups(3)
    batch = pack_for(groups, algorithm)
    before = learners(found, policy, algorithm)["policy"].score(batch)
    first = asked(source, batch, groups)[REFERENCE_LOGPROBS]
    assert torch.equal(first, before.logprobs)  # type: ignore[union-attr]
    disturb(policy)
    assert torch.equal(asked(source, batch, groups)[REFERENCE_LOGPROBS], first)
    after = learners(found, policy, algorithm)["policy"].score(batch)
    assert not torch.allclose(after.logprobs, first)  # type: ignore[union-attr]


def test_values_are_those_of_the_critic_that_learns(tiny_model_folder: Path) -> None:
    found = rollouts("ppo", tiny_model_folder)
    policy = load_policy(found.policy)
    backend, made = backend_with_scorers(found, policy, PPO())
    source = made[VALUES]
    groups = random_groups(3)
    batch = pack_for(groups, PPO())
    assert not asked(source, batch, groups)[VALUES].any(), "a critic begins at zero"
    with torch.no_grad():
        backend.learners["value"].parameters[-1].add_(0.5)
    assert asked(source, batch, groups)[VALUES].any()


@pytest.mark.parametrize(
    ("overrides", "scored"),
    [
        ([], False),
        (["grpo.async_grpo.enabled=true"], True),
        (["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"], False),
        (["grpo.update_epochs=2"], True),
        (["policy.train_global_batch_size=16"], True),
    ],
    ids=["on-policy", "asynchronous", "asynchronous in name", "two passes", "many optimizer steps"],
)
def test_the_policy_before_the_update_is_scored_only_where_it_may_differ_from_the_sampler(
    tiny_model_folder: Path, overrides: list[str], scored: bool
) -> None:
    """A KL term in the reward is measured with it."""
    algorithm = GRPO(kl=Kl(weight=0.1, place="reward"))
    found = rollouts("grpo", tiny_model_folder, *overrides)
    policy = load_policy(found.policy)
    source = backend_with_scorers(found, policy, algorithm)[1][POLICY_LOGPROBS]
    groups = random_groups(2)
    batch = pack_for(groups, algorithm)
    columns = asked(source, batch, groups)
    if not scored:
        assert columns == {}
        return
    own = learners(found, policy, algorithm)["policy"].score(batch)
    assert torch.equal(columns[POLICY_LOGPROBS], own.logprobs)  # type: ignore[union-attr]
    assert torch.equal(columns[POLICY_ENTROPY], own.entropy)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Wishful(GRPO):
    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"oracle"})


def test_a_column_that_nobody_fills_is_named(tiny_model_folder: Path) -> None:
    found = rollouts("grpo", tiny_model_folder)
    policy = load_policy(found.policy)
    with pytest.raises(ValueError, match=r"requires the columns \['oracle'\], which strop grpo does not provide"):
        backend_with_scorers(found, policy, Wishful())[1]
    with pytest.raises(ValueError, match="which strop grpo does not provide"):
        backend_with_scorers(found, policy, PPO())[1]


def test_the_policys_squared_probabilities_come_with_its_logprobs_in_one_pass(tiny_model_folder: Path) -> None:
    OptimalTokenBaseline = pytest.importorskip("strop.extensions.policy_gradients.baselines").OptimalTokenBaseline
    found = rollouts("grpo", tiny_model_folder, "algorithm.advantage=optimal_token_baseline")
    algorithm = GRPO(advantage=OptimalTokenBaseline())
    policy = load_policy(found.policy)
    sources = backend_with_scorers(found, policy, algorithm)[1]
    groups = random_groups(2)
    batch = pack_for(groups, algorithm)
    columns = asked(sources[POLICY_SQUARES], batch, groups)
    assert asked(sources[POLICY_LOGPROBS], batch, groups) == {}
    own = learners(found, policy, algorithm)["policy"].score(batch.with_column(SQUARED_PROBS, torch.ones(len(batch.target))))
    assert torch.equal(columns[POLICY_LOGPROBS], own.logprobs)  # type: ignore[union-attr]
    assert bool((columns[POLICY_SQUARES] >= 2 * columns[POLICY_LOGPROBS] - 1e-5).all())
    credited = algorithm.token_credit(batch.with_columns(columns))
    assert bool(credited.advantages.isfinite().all())
