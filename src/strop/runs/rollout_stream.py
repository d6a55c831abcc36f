"""The stream of groups that a run on rollouts trains on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from strop.checkpointing.base import RunState
from strop.config import RolloutRunConfig
from strop.environments.mixture import Mixture
from strop.generation.base import Generator, PastSelves
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, make_failed_group, run_group
from strop.rollouts.order import DropTooOld, Fifo, GroupOrder, Windowed
from strop.rollouts.prompts_ahead import PromptsAhead
from strop.rollouts.stream import RolloutStream, StreamState, requeue_stale
from strop.runs.jobs.episode_rules import make_episode_rules
from strop.runs.tasks import count_slots
from strop.safety.exits import contain_exits
from strop.sampling import Sampling
from strop.trainer.run import TrainOptions
from strop.types import Group


@dataclass(frozen=True)
class Episodes:
    """Samples the group of the task at a position of the stream."""

    config: RolloutRunConfig
    source: Mixture
    generator: Generator
    template: ChatTemplate
    sampling: Sampling
    greedy_baseline: bool = False
    past: PastSelves | None = None

    @cached_property
    def rules(self) -> EpisodeRules:
        return make_episode_rules(self.config)

    async def run(self, index: int) -> Group:
        try:
            with contain_exits():
                name, environment, task = self.source.at(index)
        except Exception as error:
            group = make_failed_group(index, self.generator.version, error)
        else:
            group = await run_group(
                index,
                name,
                environment,
                task,
                samples=self.config.rollout_training.num_generations_per_prompt,
                generator=self.generator,
                template=self.template,
                sampling=self.sampling,
                rules=self.rules,
                seed=self.config.rollout_training.seed,
                greedy_baseline=self.greedy_baseline,
                past=self.past,
            )
        self.source.observe(group)
        return group


def make_rollout_stream(
    episodes: Episodes, options: TrainOptions, state: RunState | None, ahead: PromptsAhead | None = None
) -> RolloutStream:
    """Make the stream, from where a checkpoint left it. ``ahead`` None: a prompt is made when its group begins."""
    order = make_order(episodes.config, options)

    async def run(index: int) -> Group:
        if ahead is not None:
            ahead.advance(index)
        return await episodes.run(index)

    return RolloutStream(
        run,
        slots=count_slots(episodes.config),
        size=episodes.source.size,
        has=episodes.source.has,
        state=None if state is None else resume_stream(state, options, order),
        refill_on_release=options.max_staleness > 0,
        order=order,
        version=lambda: episodes.generator.version,
    )


def resume_stream(state: RunState, options: TrainOptions, order: GroupOrder) -> StreamState:
    """Return the stream's state of a checkpoint, without groups that are too old for this run."""
    return requeue_stale(
        state.stream,
        step=state.step,
        groups_per_step=options.groups_per_step,
        max_staleness=options.max_staleness,
        order=order,
    )


def make_order(config: RolloutRunConfig, options: TrainOptions) -> GroupOrder:
    """Return the order in which finished groups are trained on. A synchronous run is always FIFO: all groups have the newest version."""
    section = config.rollout_training.async_config
    if options.drop_stale:
        return DropTooOld()
    if options.max_staleness and section.order == "windowed":
        window = options.groups_per_step if section.window is None else section.window
        return Windowed(window=window, groups_per_step=options.groups_per_step, max_staleness=options.max_staleness)
    return Fifo()
