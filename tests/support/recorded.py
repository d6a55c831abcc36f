"""Build recorded groups, classifiers with one label, and a learner that trains on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from strop.algorithms.base import Algorithm
from strop.learner.base import require_token_outputs
from strop.learner.client import AsyncColumnSource
from strop.learner.torch.learner import TorchLearner
from strop.models.chat_template import ChatTemplate
from strop.models.value_network import get_score_layer
from strop.sampling import Sampling
from strop.types import Batch, Group, Rollout, Task, Turn
from support.learners import make_torch_learner
from support.models import VOCABULARY, build, make_config
from support.rollouts import GroupShape, make_group, make_rollout, pack_for, rollout_shapes

if TYPE_CHECKING:
    from strop.extensions.recorded.examples import Conversation, Preference
    from strop.extensions.recorded.recorded_tokens import RecordedRules


def demonstration_group(index: int, name: str, example: Conversation, template: ChatTemplate, rules: RecordedRules) -> Group:
    from strop.extensions.recorded import planned_groups as recorded

    return recorded.make_group(recorded.plan_demonstration(index, name, example, rules), template, rules)


def preference_group(index: int, name: str, example: Preference, template: ChatTemplate, rules: RecordedRules) -> Group:
    from strop.extensions.recorded import planned_groups as recorded

    return recorded.make_group(recorded.plan_preference(index, name, example, rules), template, rules)


def recorded_turn(tokens: Sequence[int]) -> Turn:
    """Build a recorded turn of the policy, which was not sampled."""
    count = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        text="",
        logprobs=torch.zeros(count),
        versions=torch.full((count,), -1, dtype=torch.int32),
    )


def recorded_group(
    prompt: Sequence[int], *completions: Sequence[int], rewards: Sequence[float] = (1.0, 0.0), index: int = 0, name: str = "data"
) -> Group:
    """Build a group of recorded completions of one prompt; an empty completion has no turn."""
    rollouts = [
        make_rollout(prompt, *([recorded_turn(tokens)] if len(tokens) else []), reward=reward)
        for tokens, reward in zip(completions, rewards, strict=False)
    ]
    return replace(with_task_id(make_group(*rollouts, index=index), f"{name}:{index}"), environment=name, version=-1)


def with_task_id(group: Group, id: str) -> Group:
    return replace(group, rollouts=tuple(replace(rollout, task=Task(id=id)) for rollout in group.rollouts))


def with_prompt(rollout: Rollout, prompt: Sequence[int]) -> Rollout:
    return replace(rollout, prompt=torch.tensor(list(prompt), dtype=torch.int64))


def random_groups(count: int, completions: int = 2, *, seed: int = 0, longest: int = 6) -> list[Group]:
    """Build groups of random tokens. In a pair the first is chosen; as unpaired preferences, every other group is desirable."""
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> list[int]:
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()

    return [
        recorded_group(tokens(), *(tokens() for _ in range(completions)), rewards=(float(index % 2 == 0), 0.0), index=index)
        for index in range(count)
    ]


_pairs = st.builds(
    GroupShape,
    prompt=st.integers(1, 9),
    rollouts=st.lists(rollout_shapes, min_size=2, max_size=2).map(tuple),
    own_prompts=st.sampled_from([False, False, True]),
)
pair_shapes = st.lists(_pairs, min_size=1, max_size=4)
several_pair_shapes = st.lists(_pairs, min_size=2, max_size=4)  # there is something to cut


def build_classifier(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int | None = None) -> Any:
    """Build a sequence classifier with one label on the base model of the family's tiny language model."""
    from transformers import AutoModelForSequenceClassification

    config = make_config(family, layers)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.base_model.load_state_dict(build(family, seed=seed, layers=layers).base_model.state_dict())
    layer = get_score_layer(model)
    with torch.no_grad():
        layer.weight.copy_(0.2 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return model.to(dtype)


def make_learner(network: Any, algorithm: Algorithm, **options: Any) -> TorchLearner:
    chosen = {
        "optimizer_kwargs": {"lr": 3e-3, "weight_decay": 0.0},
        "train_tokens": 60,
        "whole_groups": algorithm.whole_groups,
        **options,
    }
    return make_torch_learner(network, Sampling(), **chosen)


def train_steps(
    learner: TorchLearner,
    algorithm: Algorithm,
    groups: Sequence[Group],
    steps: int,
    scorers: Sequence[AsyncColumnSource] = (),
    watch: Callable[[dict[str, float]], None] = lambda logged: None,
) -> list[dict[str, float]]:
    """Take optimizer steps on the same groups like the training loop. Returns the metrics of each."""

    async def add_columns(batch: Batch) -> Batch:
        for scorer in scorers:
            batch = batch.with_columns(await scorer.columns(batch, groups))
        return batch

    logged = []
    batch = algorithm.token_credit(asyncio.run(add_columns(pack_for(groups, algorithm))))
    for step in range(steps):
        surveyed = prepare_step(learner, algorithm, batch)
        seen = replace(surveyed, zero_gradient=algorithm.zero_gradient(surveyed))
        result = learner.forward_backward(seen, algorithm.losses(step)["policy"])
        logged.append({name: metric.value for name, metric in {**result.metrics, **learner.step()}.items()})
        watch(logged[-1])
    return logged


def prepare_step(learner: TorchLearner, algorithm: Algorithm, batch: Batch) -> Batch:
    outputs = require_token_outputs(learner.score(batch)) if algorithm.needs_step_outputs else None
    return algorithm.prepare_step(batch, outputs)
