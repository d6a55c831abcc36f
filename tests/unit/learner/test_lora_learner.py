"""A learner that trains adapters: one gradient however a batch is cut, a reference at no memory, and runs that go on bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.checkpointing.base import RunState
from strop.checkpointing.folders import CheckpointError, FolderCheckpointer
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer, without_adapters
from strop.models.adapters import lora_layers
from strop.models.lora import add_adapters
from strop.models.lora_config import LoraConfig
from strop.models.network import Network
from strop.models.value_network import ValueNetwork, load_classifier
from strop.rollouts.stream import StreamState
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.drawn import check_draws
from support.learners import make_scheduler_config, make_torch_learner
from support.lora import build_with_adapters, copy_weights, with_random_adapters
from support.models import build, copy_gradients, largest_difference, to_float64
from support.rollouts import GroupShape, batch_shapes, make_groups, pack_for, shapes_to_cut, simple_groups, with_columns

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=0.8)
EXACT = 1e-9
SCHEDULE = make_scheduler_config({"name": "cosine", "kwargs": {"warmup_steps": 2, "total_steps": 8}})


def make_learner(model: Any = None, **options: Any) -> TorchLearner:
    """A fresh process's learner: the base, and adapters as a run begins with them."""
    if model is None:
        model = build("llama")
        add_adapters(model, LoraConfig(), base="base")
    chosen = {"optimizer_kwargs": {"lr": 1e-2, "weight_decay": 0.01}, "train_tokens": 20, **options}
    return make_torch_learner(Network(model), SAMPLING, **chosen)


def batch_of(seed: int, **options: Any) -> Batch:
    return pack_for(simple_groups((4, (3, 5)), (6, (2, 7)), seed=seed), grpo(**options))


def train(learner: TorchLearner, batch: Batch, loss: Any = None) -> dict[str, float]:
    result = learner.forward_backward(batch, loss or grpo().loss)
    return {name: metric.value for name, metric in {**result.metrics, **learner.step()}.items()}


def score(scorer: Any, batch: Batch) -> Any:
    return scorer.score(batch)


# --- gradients ------------------------------------------------------------------------------------------------------------


class Bench:
    """One float64 model with adapters behind a packed and a padded network."""

    def __init__(self) -> None:
        self.model = with_random_adapters(to_float64(build("llama")), spread=0.1)
        assert {layer.down.dtype for layer in lora_layers(self.model)} == {torch.float64}

    def network(self, packed: bool = True) -> Network:
        return Network(self.model, precision=torch.float64, chunk=5, packed=packed)

    def gradient(
        self, batch: Batch, *, budget: int = 10**9, packed: bool = True, checkpointing: bool = False
    ) -> dict[str, Tensor]:
        self.model.zero_grad(set_to_none=True)
        learner = make_torch_learner(
            self.network(packed),
            SAMPLING,
            optimizer="torch.optim.SGD",
            optimizer_kwargs={"lr": 0.0},
            train_tokens=budget,
            activation_checkpointing=checkpointing,
        )
        learner.forward_backward(batch, grpo(kl_penalty=0.3).loss)
        self.model.gradient_checkpointing_disable()
        return copy_gradients(self.model)

    def batch(self, shapes: list[GroupShape], seed: int, *, share_prefixes: bool = True) -> Batch:
        algorithm, groups = grpo(kl_penalty=0.3), make_groups(shapes, seed)
        with torch.no_grad():
            logprobs = self.network().outputs(pack_for(groups, algorithm), SAMPLING).logprobs
        return algorithm.token_credit(with_columns(pack_for(groups, algorithm, share_prefixes=share_prefixes), logprobs))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def assert_one_gradient(bench: Bench, shapes: list[GroupShape], budget: int, seed: int) -> None:
    shared, alone = bench.batch(shapes, seed), bench.batch(shapes, seed, share_prefixes=False)
    wanted = bench.gradient(alone, packed=False)
    assert all(bool((gradient == 0).all()) for name, gradient in wanted.items() if ".lora_" not in name), "the base has none"
    for batch in (shared, alone):
        for packed in (True, False):
            assert largest_difference(bench.gradient(batch, budget=budget, packed=packed), wanted) < EXACT


def test_the_gradient_is_the_same_however_the_batch_is_cut(bench: Bench) -> None:
    """Law 1 in float64, with adapters."""
    sure = {"shapes": shapes_to_cut(rollouts=3), "budget": st.integers(8, 48), "seed": st.integers(0, 5)}
    check_draws("adapters", 3, partial(assert_one_gradient, bench), simplest=False, **sure)


@pytest.mark.exhaustive
def test_the_gradient_is_the_same_for_many_more_batches(bench: Bench) -> None:
    cuts = {"shapes": batch_shapes, "budget": st.integers(1, 60), "seed": st.integers(0, 5)}
    check_draws("many with adapters", 15, partial(assert_one_gradient, bench), **cuts)


@pytest.mark.parametrize("packed", [True, False])
def test_activation_checkpointing_gives_the_same_gradient_down_to_the_first_layer(bench: Bench, packed: bool) -> None:
    """Nothing before the first adapter has a gradient: recomputed layers must pass one on all the same."""
    batch = batch_of(0, kl_penalty=0.3)
    batch = with_columns(batch, torch.zeros(len(batch.target)))
    wanted = bench.gradient(batch, packed=packed)
    found = bench.gradient(batch, packed=packed, checkpointing=True)
    assert largest_difference(found, wanted) < 1e-12
    first = lora_layers(bench.model)[0]
    assert float(found[f"{first.name}.lora_A.default.weight"].abs().max()) > 0


# --- the reference --------------------------------------------------------------------------------------------------------


EACH_WAY = [
    pytest.param(family, precision, packed, marks=[] if (place + packed + number) % 2 == 0 else pytest.mark.exhaustive)
    for place, family in enumerate(("llama", "qwen2", "gemma2"))
    for number, precision in enumerate((torch.float32, torch.bfloat16))
    for packed in (True, False)  # in `make test` each pair of the three
]


@pytest.mark.parametrize(("family", "precision", "packed"), EACH_WAY)
def test_the_adapters_off_are_a_frozen_copy_of_the_base_to_the_last_bit(
    family: str, precision: torch.dtype, packed: bool
) -> None:
    base = NetworkScorer(Network(build(family), precision=precision, packed=packed), SAMPLING, score_tokens=13)
    network = Network(build_with_adapters(family), precision=precision, packed=packed)
    learner = make_torch_learner(network, SAMPLING, optimizer_kwargs={"lr": 1e-2}, train_tokens=20)
    reference = NetworkScorer(network, SAMPLING, 13, context=without_adapters(network))
    for step in range(3):
        batch = batch_of(step)
        wanted, found, own = score(base, batch), score(reference, batch), score(learner, batch)
        assert torch.equal(found.logprobs, wanted.logprobs)
        assert torch.equal(found.entropy, wanted.entropy)
        assert float((own.logprobs - wanted.logprobs).abs().max()) > 0.1
        train(learner, batch)


def test_a_network_without_adapters_is_not_its_own_reference() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters to disable"):
        without_adapters(Network(build("llama")))


# --- learning -------------------------------------------------------------------------------------------------------------


def test_grpo_steps_raise_the_probability_of_what_was_rewarded_and_kl_holds_them_back() -> None:
    change, distance = {}, {}
    for weight in (0.0, 5.0):
        learner = make_learner(optimizer_kwargs={"lr": 1e-2})
        reference = NetworkScorer(learner.network, SAMPLING, 100, context=without_adapters(learner.network))  # type: ignore[arg-type]
        algorithm = grpo(kl_penalty=weight)
        batch = batch_of(0, kl_penalty=weight)
        before = score(learner, batch).logprobs
        batch = batch.with_column(REFERENCE_LOGPROBS, score(reference, batch).logprobs)
        assert torch.equal(batch.columns[REFERENCE_LOGPROBS], before)
        for _ in range(6):
            train(learner, batch, algorithm.loss)
        moved = score(learner, batch).logprobs - before
        change[weight] = float((moved * batch.advantages.sign()).mean())
        distance[weight] = float(moved.square().mean())
    assert change[0.0] > 0.1
    assert distance[5.0] < distance[0.0] / 2


@pytest.mark.exhaustive
def test_a_supervised_run_learns_under_adapter_dropout_and_is_measured_without_it() -> None:
    SFT = pytest.importorskip("strop.extensions.recorded.supervised").SFT
    model = build("llama")
    add_adapters(model, LoraConfig(dropout=0.1), base="base")
    learner = make_learner(model, optimizer_kwargs={"lr": 1e-2}, max_grad_norm=None, train_tokens=100)
    batch = pack_for(simple_groups((4, (5,)), (6, (7,)), (3, (4,))), SFT())
    losses = [train(learner, batch, SFT().loss)["loss"] for _ in range(80)]
    measured = [learner.evaluate_loss(batch, SFT().loss).metrics["loss"].value for _ in range(2)]
    assert measured[0] == measured[1] < losses[-1] < losses[0] / 4


# --- saving and going on --------------------------------------------------------------------------------------------------


def optimizer_state(learner: TorchLearner) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": value.clone()
        for place, state in learner.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_killed_learner_goes_on_bit_for_bit(weights: torch.dtype, tmp_path: Path) -> None:
    """Adapters, optimizer, schedule and average; the base is not saved, it is loaded anew."""
    options: dict[str, Any] = {"schedule": SCHEDULE, "average_decay": 0.9}

    def fresh(seed: int = 0) -> TorchLearner:
        model = build("llama", dtype=weights)
        add_adapters(model, LoraConfig(), base="base", seed=seed)
        chosen = {"optimizer_kwargs": {"lr": 1e-2}, "train_tokens": 20, **options}
        return make_torch_learner(Network(model, precision=torch.bfloat16), SAMPLING, **chosen)

    straight = fresh()
    for step in range(3):
        train(straight, batch_of(step))
    straight.save(tmp_path / "policy")
    assert sorted(path.name for path in (tmp_path / "policy" / "weights").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_config.json",
    ]
    resumed = fresh(seed=9)
    resumed.load(tmp_path / "policy")
    for step in range(3, 6):
        assert train(straight, batch_of(step)) == train(resumed, batch_of(step))
    own, other = copy_weights(straight.model), copy_weights(resumed.model)
    assert all(torch.equal(own[name], other[name]) for name in own)
    left, right = optimizer_state(straight), optimizer_state(resumed)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert straight.average is not None and resumed.average is not None
    averages = [learner.average.state_dict()["average"] for learner in (straight, resumed) if learner.average]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_the_same_adapters_are_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_learner().save(tmp_path / name)
    for file in (tmp_path / "one" / "weights").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / "weights" / file.name).read_bytes()


def test_a_checkpoint_of_adapters_is_one_that_folders_save_and_load(tmp_path: Path) -> None:
    folders = FolderCheckpointer(folder=tmp_path, config_text="", save_tokenizer=lambda folder: None)
    learner = make_learner()
    train(learner, batch_of(0))
    state = RunState(step=1, stream=StreamState(next_index=2, unfinished=(), finished=()), logged={})
    folders.save(state, {"policy": learner})
    other = make_learner()
    newest = folders.find_newest()
    assert newest is not None
    assert folders.load(newest, {"policy": other}).step == 1
    assert all(torch.equal(copy_weights(other.model)[name], tensor) for name, tensor in copy_weights(learner.model).items())
    (newest / "policy" / "weights" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        folders.load(newest, {"policy": other})


def test_adapters_and_whole_models_do_not_load_each_other(tmp_path: Path) -> None:
    whole = make_torch_learner(Network(build("llama")), SAMPLING)
    whole.save(tmp_path / "whole")
    learner = make_learner()
    learner.save(tmp_path / "adapters")
    with pytest.raises(
        ValueError, match=r"holds no adapters .* and this run trains adapters; set dtensor_cfg.lora_cfg.enabled=false"
    ):
        learner.load(tmp_path / "whole")
    with pytest.raises(ValueError, match="has adapters, and this run trains the full model"):
        whole.load(tmp_path / "adapters")


@pytest.mark.exhaustive
def test_the_average_of_adapters_is_a_folder_of_adapters(tmp_path: Path) -> None:
    from peft import PeftModel

    learner = make_learner(average_decay=0.5)
    for step in range(3):
        train(learner, batch_of(step))
    learner.save(tmp_path)
    loaded = PeftModel.from_pretrained(build("llama"), str(tmp_path / "ema"))
    assert learner.average is not None
    average = learner.average.state_dict()["average"]
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[f"base_model.model.{name}"], tensor) for name, tensor in average.items())


def test_weights_are_merged_under_ordinary_names_and_adapters_come_under_pefts() -> None:
    learner = make_learner(build_with_adapters("llama"))
    weights, adapters = dict(learner.weights()), dict(learner.adapters())
    plain = build("llama")
    assert list(weights) == list(plain.state_dict())
    plain.load_state_dict(weights)
    batch = batch_of(0)
    found = score(NetworkScorer(Network(plain), SAMPLING, score_tokens=100), batch).logprobs
    assert torch.allclose(found, score(learner, batch).logprobs, atol=1e-4)
    assert len(adapters) == 28
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in adapters


# --- networks with a scalar head -----------------------------------------------------------------------------------------


def test_a_reward_model_trains_adapters_and_its_score_layer_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")

    def fresh(seed: int) -> TorchLearner:
        model = load_classifier(str(tmp_path / "base"), seed=seed)
        add_adapters(model, LoraConfig(), base=str(tmp_path / "base"), seed=seed)
        chosen: dict[str, Any] = {"optimizer_kwargs": {"lr": 1e-2}, "train_tokens": 20}
        return make_torch_learner(ValueNetwork(model), SAMPLING, **chosen)

    def loss(outputs: Any, part: Batch) -> Any:
        value = ((outputs.values - part.advantages) ** 2).sum() / part.totals.tokens
        from strop import metrics

        return value, {"loss": metrics.total(value.item())}

    straight = fresh(0)
    before = copy.deepcopy(straight.model.score.weight.detach())
    losses = [train(straight, batch_of(0), loss)["loss"] for _ in range(15)]
    assert losses[-1] < losses[0] / 2
    assert not torch.equal(straight.model.score.weight, before)
    straight.save(tmp_path / "value")
    resumed = fresh(5)
    resumed.load(tmp_path / "value")
    assert train(straight, batch_of(1), loss) == train(resumed, batch_of(1), loss)
    own, other = copy_weights(straight.model), copy_weights(resumed.model)
    assert all(torch.equal(own[name], other[name]) for name in own)
