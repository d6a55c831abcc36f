"""A replay as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from strop.extensions.replay.replay import ReplayResult, StepOutcome
from strop.safety.printable import make_printable

METRICS = (  # of a step, as far as it has them
    "train/loss", "train/grad_norm", "train/lr", "train/ratio_clipped", "train/ratio_outside_clip", "train/probs_ratio",
    "train/kl_penalty", "train/entropy", "train/value_loss", "train/value_grad_norm", "train/preference_loss", "train/accuracy",
    "train/margin", "train/nll", "train/advantages_abs",
)  # fmt: skip


def format_replay(result: ReplayResult) -> Iterator[str]:
    """Yield the lines of a table of what a replay found."""
    yield f"step {result.step} of {result.run}, from {result.weights}"
    if not result.exact:
        yield "warning: these are NOT the weights that the step began with, so nothing below is what the step did"
    yield from _format_reproduction(result)
    if result.elsewhere and (result.failed or result.reproduction.different):
        yield f"this is not where the step ran, which changes last digits: {'; '.join(make_printable(each) for each in result.elsewhere)}"
    yield ""
    headings = ["as it was", *(["with the overrides"] if result.changed else [])]
    outcomes = [result.as_it_was, *([result.changed] if result.changed else [])]
    yield f"{'':<28}" + "".join(f"{heading:>22}" for heading in headings)
    for name in METRICS:
        if any(name in outcome.metrics for outcome in outcomes):
            yield f"{name:<28}" + "".join(f"{_number(outcome.metrics.get(name)):>22}" for outcome in outcomes)
    yield f"{'clipped tokens':<28}" + "".join(f"{_clipped(outcome):>22}" for outcome in outcomes)
    if result.changed is not None:
        yield ""
        yield f"overrides: {' '.join(result.overrides)}"
        yield f"angle between the gradients (first optimizer step): {_angle(result.gradient_cosine)}"
        ratio = "unknown" if result.change_ratio is None else f"{result.change_ratio:.4g} times as far"
        yield f"angle between the changes of the weights: {_angle(result.change_cosine)}; they would have moved {ratio}"
    for heading, outcome in zip(headings, outcomes, strict=True):
        yield ""
        yield from _format_moved(heading, outcome)


def _format_reproduction(result: ReplayResult) -> Iterator[str]:
    found = result.reproduction
    if not found.different:
        others = f"{len(found.not_compared)} more, such as times, are not computed by a replay"
        yield f"{found.compared} logged metrics are reproduced to the last digit; {others}"
        return
    yield f"{len(found.different)} of {found.compared} logged metrics differ:"
    if (passes := result.passes) is not None:
        yield (
            f"  two equal passes differ in {len(passes.different)} of {passes.compared} here (a GPU, policy.deterministic=false); "
            + (
                f"by more than that differ: {', '.join(result.unexplained)}"
                if result.unexplained
                else "none differs by more than that"
            )
        )
    for name, (logged, replayed) in sorted(found.different.items()):
        yield f"  {name}: logged {logged!r}, replayed {replayed!r}"


def _format_moved(heading: str, outcome: StepOutcome) -> Iterator[str]:
    yield f"rollouts that moved most, {heading} (nats of log-probability, after less before):"
    yield f"  {'rollout':<10}{'moved':>12}{'advantage':>12}{'reward':>10}{'tokens':>8}{'clipped':>9}{'gradient':>12}  task"
    for each in outcome.moved_most:
        name = f"{each.group}/{each.sample}"
        yield (
            f"  {name:<10}{each.moved:>12.4g}{each.advantage:>12.4g}{each.reward:>10.4g}{each.tokens:>8}{each.clipped:>9}"
            f"{each.gradient:>12.4g}  {make_printable(each.task_id)}"
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def _clipped(outcome: StepOutcome) -> str:
    return "no clip" if outcome.clipped_tokens is None else f"{outcome.clipped_tokens} of {outcome.tokens}"


def _angle(cosine: float | None) -> str:
    return "unknown (one is zero)" if cosine is None else f"{math.degrees(math.acos(cosine)):.2f} degrees (cosine {cosine:.6f})"
