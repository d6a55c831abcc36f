"""Choose a layout: of those that fit, the ones with the shortest steps.

Learner and engines are searched apart, since each has its own memory and time; the best of both are put together and planned as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from strop.planning.engine_memory import EngineMemory
from strop.planning.layouts.layout_candidates import list_budgets, list_engines, list_memory_settings, list_sizes, list_splits
from strop.planning.layouts.layout_choice import (
    ChoiceSpace,
    DeviceSplit,
    EngineChoice,
    LayoutChoice,
    LearnerChoice,
    apply_choice,
    apply_critic,
    apply_engine,
    apply_learner,
)
from strop.planning.learner_memory import LearnerFootprint
from strop.planning.make_plan import LEAST_SEQUENCES, count_beside, limit_of, make_clock, plan_memory, plan_time
from strop.planning.plan_inputs import PlanInputs
from strop.planning.step_time import StepClock

MARGIN = 0.95  # of the memory that can be used: what a choice may take
CHANGE_COST = 0.005  # of a step, for each setting that differs: a longer command must be worth it
KEPT_LEARNERS = 6  # of each split, that are put together with its engines


@dataclass(frozen=True)
class RankedLayout:
    """A layout that fits."""

    choice: LayoutChoice
    seconds: float  # of its step
    changes: int  # from the configuration

    @property
    def score(self) -> float:
        """The seconds of its step, more for each change."""
        return self.seconds * (1 + CHANGE_COST * self.changes)


def rank_layouts(inputs: PlanInputs, space: ChoiceSpace) -> list[RankedLayout]:
    """Return the layouts that fit, the best first; of equal parallel sizes, engines and splits the best alone."""
    ranked: list[RankedLayout] = []
    for split in list_splits(inputs, space):
        learners = _rank_learners(inputs, space, split)
        engines = _rank_engines(inputs, space, split)
        for learner in learners:
            for engine in engines:
                choice = LayoutChoice(split=split, learner=learner, engine=engine)
                if (seconds := _time_if_it_fits(inputs, space, choice)) is not None:
                    ranked.append(RankedLayout(choice, seconds, choice.count_changes(space.given)))
    ranked.sort(key=lambda each: each.score)
    best: dict[object, RankedLayout] = {}
    for each in ranked:
        size = None if each.choice.engine is None else each.choice.engine.size
        best.setdefault((each.choice.split, each.choice.learner.sizes, size), each)
    return list(best.values())


def _time_if_it_fits(inputs: PlanInputs, space: ChoiceSpace, choice: LayoutChoice) -> float | None:
    """Return the seconds of a step; None for a layout that does not fit."""
    changed = apply_choice(inputs, choice, space)
    if any(phase.peak > MARGIN * phase.limit for phase in plan_memory(changed)):
        return None
    return plan_time(changed).total


def _rank_learners(inputs: PlanInputs, space: ChoiceSpace, split: DeviceSplit) -> list[LearnerChoice]:
    """Return the learners with the shortest passes whose training fits, of each parallel sizes one."""
    devices = space.count_training(split)
    placed = apply_engine(inputs, split, None, space)
    found: list[tuple[float, LearnerChoice]] = []
    for sizes in list_sizes(inputs, space, devices):
        timed = (
            (_time_learner(placed, choice, space, devices), choice) for choice in _list_fitting(placed, space, sizes, devices)
        )
        if (best := min(timed, key=lambda each: each[0], default=None)) is not None:
            found.append(best)
    return [choice for _, choice in sorted(found, key=lambda each: each[0])[:KEPT_LEARNERS]]


def _time_learner(placed: PlanInputs, choice: LearnerChoice, space: ChoiceSpace, devices: int) -> float:
    """Return the seconds of a learner's passes, more for each change."""
    learner = apply_learner(placed.learner, choice, space, devices)
    seconds = StepClock(placed.model, placed.work, placed.layout, learner).time_learner()
    return seconds * (1 + CHANGE_COST * choice.count_changes(space.given.learner))


def _list_fitting(placed: PlanInputs, space: ChoiceSpace, sizes: LearnerChoice, devices: int) -> Iterator[LearnerChoice]:
    """Yield the settings of some parallel sizes with which training fits: the largest micro-batch, and the configured one; with a pipeline,
    which has to wait for its first and last micro-batch, all of them. What saves memory that is not needed is left out."""
    roomy: list[LearnerChoice] = []
    for setting in list_memory_settings(sizes, placed, space):
        if setting.offloads_reference and replace(setting, offloads_reference=False) in roomy:
            continue
        budgets = list_budgets(setting, placed, space, devices)
        choices = (replace(setting, tokens=tokens) for tokens in budgets)
        fitting = list(takewhile(lambda choice: _training_fits(placed, space, choice, devices), choices))
        few = [choice for choice in fitting if choice.tokens == sizes.tokens]
        yield from fitting if sizes.stages > 1 else dict.fromkeys([*few, *fitting[-1:]])
        if len(fitting) == len(budgets):
            roomy.append(setting)
            if setting.saves_nothing:
                return


def _training_fits(placed: PlanInputs, space: ChoiceSpace, choice: LearnerChoice, devices: int) -> bool:
    footprint = LearnerFootprint(placed.model, apply_learner(placed.learner, choice, space, devices))
    references = 0 if choice.offloads_reference else space.references
    changed = apply_critic(placed, choice, space, devices)
    beside = sum(count_beside(changed, footprint, references).values())
    critics = (footprint.static + sum(each.training.values()) for each in changed.beside if each.learns)
    return max(footprint.training_peak, footprint.scoring_peak, *critics) + beside <= MARGIN * limit_of(placed)


def _rank_engines(inputs: PlanInputs, space: ChoiceSpace, split: DeviceSplit) -> list[EngineChoice | None]:
    """Return the engine of each size with the shortest generation that has room for a few of the longest conversations."""
    found: list[tuple[float, EngineChoice]] = []
    for engine in list_engines(inputs, space, split):
        if engine is None:
            return [None]
        changed = apply_engine(inputs, split, engine, space)
        assert changed.engine is not None
        memory = EngineMemory(changed.model, changed.engine, limit_of(changed))
        if memory.sequences < LEAST_SEQUENCES and engine != space.given.engine:
            continue
        found.append((make_clock(changed).time_generation(), engine))
    best: dict[int, EngineChoice] = {}
    for _, engine in sorted(found, key=lambda each: each[0] * (1 + CHANGE_COST * (each[1] != space.given.engine))):
        best.setdefault(engine.size, engine)
    return list(best.values())
