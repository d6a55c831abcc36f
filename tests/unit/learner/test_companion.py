"""What an extension trains beside the policy: it reads the policy's passes, steps with it and is saved beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from strop import metrics
from strop.base_config import subsection
from strop.learner.learner_config import PolicyExtension
from strop.learner.model_config import ModelConfig
from strop.learner.torch.companion import Companion, CompanionOptions
from strop.metrics import Metrics
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build
from support.rollouts import pack_for, simple_groups


class Counter:
    """Counts the passes that it watches; its one weight is the number of tokens."""

    def __init__(self) -> None:
        self.watched, self.gradient, self.steps = 0, 0, 0
        self.weight = torch.zeros(1)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.watched += 1
        yield

    def accumulate(self, batch: Batch) -> Metrics:
        self.gradient += len(batch.tokens)
        return {"tokens_read": metrics.total(float(len(batch.tokens)))}

    def drop_gradients(self) -> None:
        self.gradient = 0

    def step(self) -> Metrics:
        self.steps += 1
        self.weight += self.gradient
        return {"counted": metrics.mean(float(self.gradient), 1)}

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight

    def stage(self, *, optimizer: bool) -> Counter:
        twin = Counter()
        twin.weight = self.weight.clone()
        return twin

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        (folder / "counter").mkdir()
        torch.save(self.weight, folder / "counter" / "weight.pt")

    def load(self, folder: Path) -> None:
        self.weight = torch.load(folder / "counter" / "weight.pt", weights_only=True)


class CounterConfig(PolicyExtension):
    """Keys of an extension."""

    enabled: bool = True

    def make_companion(self, network: Network, options: CompanionOptions) -> Companion | None:
        assert options.section == "policy" and not options.on_ranks
        return Counter() if self.enabled else None


class CountedModelConfig(ModelConfig):
    """A model with them."""

    counter: CounterConfig = subsection(CounterConfig)


def train(kind: type[ModelConfig]) -> tuple[dict[str, Tensor], Metrics, Metrics, Counter | None, object]:
    learner = make_torch_learner(Network(build("llama")), Sampling(), kind=kind, train_tokens=16)
    result = learner.forward_backward(pack_for(simple_groups((5, (3, 6)), (2, (6, 2))), grpo()), grpo().loss)
    stepped = learner.step()
    companion = learner.companion
    assert companion is None or isinstance(companion, Counter)
    return {name: tensor.clone() for name, tensor in learner.weights()}, result.metrics, stepped, companion, learner


def test_it_reads_each_pass_and_steps_with_the_policy_which_it_does_not_change() -> None:
    plain, measured, _, none, _ = train(ModelConfig)
    weights, counted, stepped, counter, _ = train(CountedModelConfig)
    assert none is None and "tokens_read" not in measured and counter is not None
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert counter.watched > 1 and counter.steps == 1 and counter.gradient == 0
    assert stepped["counted"].value == counted["tokens_read"].value == float(counter.weight)


def test_it_is_saved_staged_and_loaded_with_the_policy(tmp_path: Path) -> None:
    *_, counter, learner = train(CountedModelConfig)
    assert counter is not None
    learner.save(tmp_path / "now")  # type: ignore[attr-defined]
    staged = learner.stage()  # type: ignore[attr-defined]
    counter.weight += 1
    staged.save(tmp_path / "staged")
    for folder in ("now", "staged"):
        again = make_torch_learner(Network(build("llama")), Sampling(), kind=CountedModelConfig)
        again.load(tmp_path / folder)
        assert isinstance(again.companion, Counter) and torch.equal(again.companion.weight, counter.weight - 1)
