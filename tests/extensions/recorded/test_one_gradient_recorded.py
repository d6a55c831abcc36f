"""Law 1 for everything that learns from recorded data: the gradient does not depend on how a batch is cut.

Everything is float64, as in test_one_gradient.py; asserted 1e-9 relative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.extensions.recorded.preference.online_dpo import OnlineDPO
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.preference.unpaired import KTO
from strop.extensions.recorded.supervised import SFT
from strop.models.network import Network
from strop.models.value_network import ValueNetwork
from strop.sampling import Sampling
from strop.types import Batch, Group
from support.drawn import check_draws
from support.learners import make_torch_learner
from support.models import build, copy_gradients, largest_difference, to_float64
from support.recorded import build_classifier, pair_shapes, recorded_group, several_pair_shapes
from support.rollouts import GroupShape, make_groups, pack_for, with_columns
from support.sweep import one_in, sweep

pytestmark = pytest.mark.slow

EXACT = 1e-9


def named(name: str, **options: Any) -> Algorithm:
    return all_algorithms()[name](**options)


ALGORITHMS: dict[str, Algorithm] = {
    "sft": SFT(),
    "sft_per_sequence": SFT(aggregation="sequence_mean"),
    "dft": SFT(dft=True),
    "dpo": DPO(),
    "dpo_of_means": DPO(average_log_probs=True),
    "dpo_with_sft": DPO(sft_weight=0.3, sft_aggregation="token_mean"),
    "dpo_with_sft_sums": DPO(sft_weight=0.3, sft_aggregation="sequence_sum"),
    "cdpo": named("cdpo"),
    "robust_dpo": named("robust_dpo"),
    "ipo": named("ipo"),
    "ipo_of_sums": named("ipo", average_log_probs=False),
    "slic": named("slic", beta=0.3),
    "simpo": named("simpo"),
    "orpo": named("orpo", preference_weight=0.5),
    "apo_zero": named("apo_zero"),
    "apo_down": named("apo_down"),
    "kto": KTO(beta=0.3, undesirable_weight=0.6),
    "dpo_weighted": DPO(beta=0.3, use_weighting=True, ld_alpha=0.4, f_divergence_type="js_divergence"),
    "aot": named("aot", beta=0.3, label_smoothing=0.1, ld_alpha=0.4),
    "aot_unpaired": named("aot_unpaired", beta=0.3),
    "cpo": named("cpo"),
    "alphapo": named("alphapo"),
    "exo_pair": named("exo_pair", beta=0.3),
    "nca_pair": named("nca_pair", beta=0.3),
    "bco_pair": named("bco_pair", beta=0.3),
    "sppo_hard": named("sppo_hard", beta=0.3),
    "discopop": named("discopop", beta=0.3),
    "apo_zero_unpaired": named("apo_zero_unpaired", beta=0.3, undesirable_weight=0.6),
    "reward_model": named("reward_model"),
    "reward_model_with_margin_and_centering": named("reward_model", use_margin=True, centering=0.1),
    "reward_model_of_scores": named("reward_model", kind="regression"),
}


CUTS: dict[str, Any] = {"shapes": pair_shapes, "budget": st.integers(1, 60), "seed": st.integers(0, 5)}
SURE_CUTS: dict[str, Any] = {"shapes": several_pair_shapes, "budget": st.integers(8, 48), "seed": st.integers(0, 5)}


class Bench:
    """A float64 language model and a float64 classifier, each behind a packed and a padded network."""

    def __init__(self, family: str, *, layers: int = 2, chunk: int = 5) -> None:
        self.chunk = chunk
        self.models = {
            "tokens": to_float64(build(family, layers=layers)),
            "last_token": to_float64(build_classifier(family, dtype=torch.float64, layers=layers)),
        }

    def network(self, algorithm: Algorithm, packed: bool = True) -> Network:
        kind = ValueNetwork if algorithm.predict == "last_token" else Network
        return kind(self.models[algorithm.predict], precision=torch.float64, chunk=self.chunk, packed=packed)

    def gradient(
        self, batch: Batch, algorithm: Algorithm, *, budget: int = 10**9, packed: bool = True
    ) -> tuple[dict[str, Tensor], Any]:
        model = self.models[algorithm.predict]
        model.zero_grad(set_to_none=True)
        learner = make_torch_learner(
            self.network(algorithm, packed),
            Sampling(),
            optimizer="torch.optim.SGD",
            optimizer_kwargs={"lr": 0.0},
            train_tokens=budget,
            whole_groups=algorithm.whole_groups,
        )
        result = learner.forward_backward(batch, algorithm.losses(0)["policy"])
        return copy_gradients(model), result

    def batches(self, groups: Sequence[Group], algorithm: Algorithm) -> dict[str, Batch]:
        """The groups with and without shared prefixes, with the same columns; the survey sees the whole step."""
        shared, alone = (pack_for(groups, algorithm, share_prefixes=share) for share in (True, False))
        if algorithm.predict == "last_token":
            return {"shared": shared, "alone": alone}
        outputs = self.outputs(shared, algorithm)
        columns = [with_columns(batch, outputs.logprobs) for batch in (shared, alone)]
        prepared = [algorithm.prepare_step(algorithm.token_credit(batch), outputs) for batch in columns]
        return dict(
            zip(
                ("shared", "alone"),
                (replace(batch, zero_gradient=algorithm.zero_gradient(batch)) for batch in prepared),
                strict=True,
            )
        )

    def outputs(self, batch: Batch, algorithm: Algorithm) -> TokenOutputs:
        with torch.no_grad():
            return self.network(algorithm).outputs(batch, Sampling())


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("llama")


@pytest.fixture(scope="module")
def single_layer() -> Bench:
    """What an algorithm makes of its outputs is the same whatever number of layers they come from."""
    return Bench("llama", layers=1, chunk=16)


def test_every_algorithm_of_recorded_data_is_here() -> None:
    known = {kind for kind in all_algorithms().values() if kind.recorded_data}
    assert known == {type(algorithm) for algorithm in ALGORITHMS.values()}


def compare_cuts(bench: Bench, algorithm: Algorithm, shapes: list[GroupShape], budget: int, seed: int) -> None:
    assert_one_gradient(bench, algorithm, make_groups(shapes, seed), budget)


@pytest.mark.parametrize("name", one_in(2, ALGORITHMS))
def test_the_gradient_is_the_same_however_the_batch_is_cut(single_layer: Bench, name: str) -> None:
    check_draws(name, 1, partial(compare_cuts, single_layer, ALGORITHMS[name]), simplest=False, **SURE_CUTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_same_for_many_more_batches(bench: Bench, name: str) -> None:
    check_draws(f"many of {name}", 12, partial(compare_cuts, bench, ALGORITHMS[name]), **CUTS)


@pytest.mark.parametrize("name", ["sft", "dpo_with_sft", "kto", "orpo", "reward_model"])
@pytest.mark.parametrize("budget", sweep([1, 12, 10**9], 1))
def test_the_gradient_is_the_same_with_empty_completions_and_prefixes_of_each_other(bench: Bench, name: str, budget: int) -> None:
    groups = [
        recorded_group([4, 5], [6, 7], [6, 7, 8]),
        recorded_group([9], [10, 11, 12], [], rewards=(0.0, 0.0), index=1),
        recorded_group([13, 14, 15], [], [16], index=2),
        recorded_group([17], [18], [19], index=3),
    ]
    assert_one_gradient(bench, ALGORITHMS[name], groups, budget)


@pytest.mark.parametrize("name", ["dpo_with_sft", "kto", "reward_model"])
def test_the_gradient_is_the_same_for_another_family(name: str) -> None:
    """Mistral's window of 7 is shorter than these sequences."""
    groups = [recorded_group([4, 5, 6, 7, 8], [6, 7] * 4, [6, 7, 8]), recorded_group([9], [10, 11, 12], [3] * 10, index=1)]
    for budget in (1, 20):
        assert_one_gradient(Bench("mistral"), ALGORITHMS[name], groups, budget)


def assert_one_gradient(bench: Bench, algorithm: Algorithm, groups: Sequence[Group], budget: int) -> None:
    batches = bench.batches(groups, algorithm)
    shared, alone = batches["shared"], batches["alone"]
    wanted, result = bench.gradient(alone, algorithm, packed=False)  # padded rows through the model's own attention
    layouts = {
        "padded, cut": bench.gradient(alone, algorithm, packed=False, budget=budget),
        "packed": bench.gradient(alone, algorithm),
        "packed, cut": bench.gradient(alone, algorithm, budget=budget),
        "shared prefixes": bench.gradient(shared, algorithm),
        "shared prefixes, cut": bench.gradient(shared, algorithm, budget=budget),
        "shared prefixes read as padded rows, cut": bench.gradient(shared, algorithm, budget=budget, packed=False),
    }
    for layout, (found, other) in layouts.items():
        assert largest_difference(found, wanted) < EXACT, layout
        assert other.metrics.keys() == result.metrics.keys()
        for name, metric in result.metrics.items():
            assert other.metrics[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12), (layout, name)


def test_the_gradient_of_dpo_is_that_of_the_formula_written_out(bench: Bench) -> None:
    """An oracle that knows no packing or totals: each completion through the model alone."""
    groups = [recorded_group([4, 5], [6, 7], [6, 7, 8]), recorded_group([9], [10, 11, 12], [13], index=1)]
    algorithm = DPO(beta=0.3)
    batch = bench.batches(groups, algorithm)["shared"]
    found, result = bench.gradient(batch, algorithm, budget=1)

    model = bench.models["tokens"]
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("sdpa")
    reference = iter(batch.columns["reference_logprobs"].double().tolist())
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        gaps = []
        for rollout in group.rollouts:
            logs = model(input_ids=rollout.tokens()[None]).logits[0].log_softmax(-1)
            gap = torch.zeros((), dtype=torch.float64)
            for place in range(len(rollout.prompt), rollout.length):
                gap = gap + logs[place - 1, rollout.tokens()[place]] - next(reference)
            gaps.append(gap)
        total = total - torch.log(1 / (1 + torch.exp(-0.3 * (gaps[0] - gaps[1]))))
    loss = total / 2
    loss.backward()
    assert result.metrics["loss"].value == pytest.approx(loss.item(), rel=1e-9)
    assert largest_difference(found, copy_gradients(model)) < EXACT


def test_the_gradient_of_online_dpo_is_the_same_however_the_batch_is_cut(bench: Bench) -> None:
    """Groups of three and two, one of them without a pair; a whole group may exceed the budget."""
    rewards = [(0.2, 1.0, 0.0), (1.0, 1.0), (0.0, 0.5), (0.3, 0.3, 0.7)]
    tokens = [[6, 7], [6, 7, 8], [9]]
    groups = [recorded_group([4, 5], *tokens[: len(each)], rewards=each, index=index) for index, each in enumerate(rewards)]
    algorithm = OnlineDPO(beta=0.3, sft_weight=0.2, ld_alpha=0.5)
    batches = bench.batches(groups, algorithm)
    wanted, result = bench.gradient(batches["alone"], algorithm, packed=False)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for batch, packed, budget in ((batches["shared"], True, 10**9), (batches["shared"], True, 1), (batches["alone"], False, 8)):
        found, other = bench.gradient(batch, algorithm, packed=packed, budget=budget)
        assert largest_difference(found, wanted) < EXACT
        assert other.metrics["loss"].value == pytest.approx(result.metrics["loss"].value, rel=1e-9)


def test_the_reference_point_of_kto_is_the_learners_own_word(bench: Bench) -> None:
    """What the loop's survey gives, in float32 and cut into micro-batches, is what the whole step in float64 gives."""
    groups = [recorded_group([4, 5], [6, 7], [6, 7, 8]), recorded_group([9], [10, 11, 12], [13], rewards=(0.0, 0.0), index=1)]
    algorithm = KTO()
    batch = bench.batches(groups, algorithm)["shared"]
    learner = make_torch_learner(bench.network(algorithm), Sampling(), score_tokens=3)
    surveyed = algorithm.prepare_step(batch, learner.score(batch))  # type: ignore[arg-type]
    wanted = batch.column("kto_reference_point")
    assert torch.allclose(surveyed.column("kto_reference_point"), wanted, atol=1e-6)


def test_a_learner_that_cuts_pairs_is_told_so(bench: Bench) -> None:
    batch = bench.batches([recorded_group([4, 5], [6, 7], [6, 7, 8])], DPO())["shared"]
    learner = make_torch_learner(bench.network(DPO()), Sampling(), train_tokens=4)
    with pytest.raises(ValueError, match="a learner must not split a group"):
        learner.forward_backward(batch, DPO().loss)
