"""The rules of a run's episodes, from its configuration. Apart from the tasks, which are made without torch."""

from __future__ import annotations

from strop.config import RolloutRunConfig
from strop.config.schema.run_config import GrpoRunConfig
from strop.rollouts.episode import EpisodeRules


def make_episode_rules(config: RolloutRunConfig) -> EpisodeRules:
    scaling = config.rollout_training.reward_scaling
    penalties = config.reward_penalties if isinstance(config, GrpoRunConfig) else None
    return EpisodeRules(
        max_turns=config.rollout_training.max_rollout_turns,
        max_length=config.policy.max_total_sequence_length,
        max_prompt_length=config.data.max_input_seq_length,
        scaling=scaling if scaling.enabled else None,
        penalties=penalties if penalties is not None and penalties.enabled else None,
        gateway=config.gateway,
        tool_call_format=config.policy.tokenizer.tool_call_format,
    )
