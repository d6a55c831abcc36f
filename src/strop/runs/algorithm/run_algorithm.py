"""Create the algorithm of a run without importing torch, so that incompatibilities are found before anything is loaded."""

from __future__ import annotations

from strop.algorithm_factory import make_algorithm
from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.policy_gradient.composition import Composition
from strop.config import GrpoRunConfig, RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.runs.algorithm.sections import check_algorithm, check_section
from strop.runs.algorithm.settings import collect_settings
from strop.runs.tasks import have_turn_states, list_reward_names


def make_run_algorithm(config: TrainingRunConfig) -> Algorithm:
    """Create the algorithm of a run. Raises ValueError if the algorithm, its parts and the run are incompatible."""
    if isinstance(config, RolloutRunConfig):
        return make_rollout_algorithm(config)
    assert isinstance(config, RecordedRunConfig)
    return make_recorded_algorithm(config)


def make_rollout_algorithm(config: RolloutRunConfig) -> Algorithm:
    """Create the algorithm of a run on rollouts. Raises ValueError if the algorithm, its parts and the run are incompatible."""
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))
    check_section(config.algorithm.name, algorithm, config.section)
    training = config.rollout_training
    plan = Plan(
        group_size=training.num_generations_per_prompt,
        optimizer_steps=count_steps_per_batch(config) * training.epochs_per_batch,
        max_staleness=training.max_staleness,
        environment_rewards=list_reward_names(config),
        step_rewards=bool(list_reward_names(config, of_steps=True)),
        quantized_rollouts=config.policy.generation.weight_format or "",
        turn_states=have_turn_states(config),
    )
    check_algorithm(algorithm, plan)
    _check_penalties(config, algorithm)
    return algorithm


def _check_penalties(config: RolloutRunConfig, algorithm: Algorithm) -> None:
    """Raise ValueError if turns would get advantages that the algorithm does not read."""
    if isinstance(config, GrpoRunConfig) and config.reward_penalties.gives_advantages and not isinstance(algorithm, Composition):
        raise ValueError(
            f"reward_penalties gives turns separate advantages, which the algorithm {config.algorithm.name} does not read; set "
            "invalid_tool_call_advantage and malformed_think_tag_advantage to null, or penalize_invalid_tool_call and "
            "penalize_malformed_think_tag to true, which set the reward"
        )


def make_recorded_algorithm(config: RecordedRunConfig) -> Algorithm:
    """Create the algorithm of a run on recorded data. Raises ValueError if it belongs to another kind of run."""
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))
    check_section(config.algorithm.name, algorithm, config.section)
    check_algorithm(algorithm, Plan())
    return algorithm


def count_steps_per_batch(config: RolloutRunConfig) -> int:
    """Return the number of optimizer steps in one pass over the rollouts of a step."""
    per_step = config.rollout_training.rollouts_per_step
    return per_step // (config.policy.train_global_batch_size or per_step)
