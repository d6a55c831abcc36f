"""The tokens of a step with the largest sampler/learner mismatch. Read them when ``train/token_mult_prob_error`` is too large.

<log folder>/rollouts/step_000012_ratios.jsonl        one row per token, the largest |log ratio| first
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from strop.monitoring.rollout_store.rollout_record import RolloutRecord

MAX_TOKENS = 32  # tokens stored per step
CONTEXT_TOKENS = 24  # preceding tokens shown with each token

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class TokenRatio:
    """One token with its log-probabilities under the sampler and under the learner before the update."""

    step: int
    log_ratio: float  # learner - sampler, in nats
    token: int
    text: str
    context: str  # the preceding text, which may include the end of the prompt
    position: int  # among the sampled tokens of its rollout, 1-based
    turn: int  # of the policy, 1-based
    version: int  # of the weights that sampled it
    sampler_logprob: float
    learner_logprob: float
    task_id: str
    group: int
    sample: int


def find_largest_ratios(records: Sequence[RolloutRecord], decode: Decode, count: int = MAX_TOKENS) -> list[TokenRatio]:
    """Return the ``count`` tokens with the largest |log ratio| among rollouts that the learner scored. NaN ranks above all numbers."""
    found = [_find_differences(record) for record in records]
    sizes = numpy.concatenate([numpy.zeros(0), *(sizes for _, sizes in found)])
    owners = numpy.repeat(numpy.arange(len(records)), [len(places) for places, _ in found])
    tokens = numpy.concatenate([numpy.zeros(0, dtype=numpy.int64), *(places for places, _ in found)])
    if len(sizes) > count:  # among equal ratios the first token ranks first
        kept = sizes >= numpy.partition(sizes, -count)[-count]
        sizes, owners, tokens = sizes[kept], owners[kept], tokens[kept]
    ranked = (-sizes).argsort(kind="stable")[:count].tolist()
    return [_token_ratio(records[int(owners[place])], int(tokens[place]), decode) for place in ranked]


def _find_differences(record: RolloutRecord) -> tuple[Any, Any]:
    """Return the indices of sampled tokens on which sampler and learner differ, and their |log ratio|: NaN counts as infinite."""
    if record.learner_logprobs is None:
        return numpy.zeros(0, dtype=numpy.int64), numpy.zeros(0)
    sampler, learner = (numpy.asarray(each, dtype=numpy.float64) for each in (record.sampler_logprobs, record.learner_logprobs))
    places = (numpy.asarray(record.sampled, dtype=bool) & (sampler != learner)).nonzero()[0]
    with numpy.errstate(invalid="ignore"):
        sizes = numpy.abs(learner[places] - sampler[places])
    return places, numpy.where(numpy.isnan(sizes), numpy.inf, sizes)


def _token_ratio(record: RolloutRecord, index: int, decode: Decode) -> TokenRatio:
    assert record.learner_logprobs is not None
    sampler, learner = record.sampler_logprobs[index], record.learner_logprobs[index]
    context = [*record.prompt_tokens, *record.tokens[:index]][-CONTEXT_TOKENS:]
    sampled = record.sampled[: index + 1]
    turn_starts = [is_sampled and not (i and sampled[i - 1]) for i, is_sampled in enumerate(sampled)]
    return TokenRatio(
        step=record.step,
        log_ratio=learner - sampler,
        token=record.tokens[index],
        text=decode([record.tokens[index]]),
        context=decode(context),
        position=sum(sampled),
        turn=sum(turn_starts),
        version=record.versions[index],
        sampler_logprob=sampler,
        learner_logprob=learner,
        task_id=record.task_id,
        group=record.group,
        sample=record.sample,
    )


def encode_ratios(rows: Sequence[TokenRatio]) -> bytes:
    """Return the rows as JSON lines. NaN and infinities become the strings "nan", "inf" and "-inf", which float() parses."""
    lines = []
    for row in rows:
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(row).items()
        }
        lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
    return "".join(lines).encode()


def read_ratios(path: Path) -> list[TokenRatio]:
    with path.open(encoding="utf-8") as file:
        return [_from_json(json.loads(line)) for line in file]


def _from_json(row: dict[str, object]) -> TokenRatio:
    numbers = {name: float(str(row[name])) for name in ("log_ratio", "sampler_logprob", "learner_logprob")}
    return TokenRatio(**{**row, **numbers})  # type: ignore[arg-type]
