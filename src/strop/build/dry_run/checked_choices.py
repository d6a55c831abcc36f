"""Choose layouts for a run, and load each as a user would: what the loader refuses is no choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from strop.build.dry_run.layout_overrides import list_overrides, read_space
from strop.config import TrainingRunConfig
from strop.config.checks import run_checks
from strop.planning.layouts.choose_layout import rank_layouts
from strop.planning.layouts.layout_choice import ChoiceSpace
from strop.planning.plan_inputs import PlanInputs
from strop.planning.plan_text import format_seconds
from strop.planning.run_plan import PlanChoice, RunPlan
from strop.problems import ConfigError

MOST_CHOICES = 3  # in the table
MOST_SEEN = 12  # of the best layouts, until there are so many
LEAST_GAIN = 0.97  # of the configured step's time, below which a change is worth its while

Better = tuple[tuple[str, ...], float]  # overrides, and the seconds of a step with them
Load = Callable[[Sequence[str]], TrainingRunConfig]
MakePlan = Callable[[TrainingRunConfig], RunPlan]


def add_choices(given: RunPlan, inputs: PlanInputs, config: TrainingRunConfig, load: Load, make: MakePlan) -> RunPlan:
    """Return a plan with the best layouts beside it.

    ``load`` returns the configuration with further overrides, and raises ConfigError; ``make`` plans it. A choice fits by its own plan and
    is not slower than the configuration, where that fits.
    """
    space = read_space(config, inputs)
    if given.fits and not space.ranks:
        return replace(given, verdict="one device trains: there is nothing to divide, and the run fits as it is configured")
    known = _find_problems(config)
    choices: list[PlanChoice] = []
    for overrides, seconds in list(_list_better(given, inputs, space, config))[:MOST_SEEN]:
        plan = None if _adds_nothing(overrides, seconds, choices) else _try(overrides, load, make, known)
        if plan is not None and plan.fits and _is_faster(plan.time.total, given):
            choices.append(PlanChoice(overrides=overrides, plan=plan))
        if len(choices) == MOST_CHOICES:
            break
    choices.sort(key=lambda choice: choice.plan.time.total)
    return replace(given, choices=tuple(choices), verdict=_judge(given, choices))


def _list_better(given: RunPlan, inputs: PlanInputs, space: ChoiceSpace, config: TrainingRunConfig) -> Iterator[Better]:
    """Yield the overrides and the seconds of layouts that seem better than the configured one, the best first."""
    critic_layers = next((each.model.num_layers for each in inputs.beside if each.learns), None)
    for ranked in rank_layouts(inputs, space):
        overrides = list_overrides(ranked.choice, space, config, inputs.model.num_layers, critic_layers)
        if overrides and _is_faster(ranked.seconds, given):
            yield overrides, ranked.seconds


def _is_faster(seconds: float, given: RunPlan) -> bool:
    """Whether a step is worth changes: a configuration that does not fit is worth any."""
    return not given.fits or seconds <= LEAST_GAIN * given.time.total


def _adds_nothing(overrides: Sequence[str], seconds: float, choices: Sequence[PlanChoice]) -> bool:
    """Whether a better choice gets as far with fewer changes: some of these."""
    return any(set(each.overrides) < set(overrides) and seconds > 0.99 * each.plan.time.total for each in choices)


def _try(overrides: Sequence[str], load: Load, make: MakePlan, known: frozenset[tuple[str, str]]) -> RunPlan | None:
    """Return the plan of the run with the overrides; None where they are refused for a reason that the configuration is not."""
    try:
        changed = load(overrides)
        return make(changed) if _find_problems(changed) <= known else None
    except (ConfigError, ValueError):
        return None


def _find_problems(config: TrainingRunConfig) -> frozenset[tuple[str, str]]:
    """Return what the loader's checks find, the packages that are missing here among them."""
    return frozenset((problem.key, problem.message) for problem in run_checks.find_errors(config))


def _judge(given: RunPlan, choices: Sequence[PlanChoice]) -> str:
    """Say why the configuration is not the best, or that it is."""
    if not choices:
        if given.node is not None and not given.node.fits and all(phase.fits for phase in given.phases):
            return "the devices have room; the layouts that were tried do not bring a node's CPU memory below its limit"
        kept = "is as good as any that was found" if given.fits else "does not fit, and neither does any other on these devices"
        return f"the layout of the configuration {kept}"
    best = choices[0].plan
    if not given.fits:
        full = max(given.phases, key=lambda phase: phase.peak / phase.limit)
        what = "the CPU memory of a node" if full.fits else full.phase
        return f"as configured {what} does not fit; with 1 it does"
    saved = {name: given.seconds[name] - seconds for name, seconds in best.seconds.items()}
    name = max(saved, key=lambda each: saved[each])
    return (
        f"1 takes {1 - best.time.total / given.time.total:.0%} less than the configuration, most of it in {name}: "
        f"{format_seconds(best.seconds[name])} in place of {format_seconds(given.seconds[name])}"
    )
