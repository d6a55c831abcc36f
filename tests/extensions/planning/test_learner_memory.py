"""The memory that a plan computes beside what torch's allocator holds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.algorithm_factory import make_algorithm
from strop.extensions.planning import learner_memory
from strop.extensions.planning.learner_memory import LearnerFootprint, LearnerSetup, ModelSize, ParallelSizes, Sharding
from strop.extensions.planning.plan_inputs import BesideModel, without_output
from strop.learner.budget.device_memory import measure_peak
from strop.learner.budget.memory_probe import make_full_rollouts
from strop.models.attention import attention_plan, kernel_choice
from strop.models.loading import cast_weights
from strop.models.logprobs import lm_head, token_logprobs
from strop.models.network import Network
from strop.models.value_network import ValueNetwork
from strop.sampling import Sampling
from support.learners import make_torch_learner

FOLDER = Path(__file__).parents[3] / "benchmarks"
BOUND = 0.1
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MODEL = ModelSize.from_config("llama", LLAMA_8B)
SETUP = LearnerSetup(tokens=8192, longest=8192, on_cpu=False, compute_bytes=2)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("plan_memory")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "float32", "rollouts": 2, "length": 128, "micro_batches": 1},
        {"precision": "bfloat16", "length": 128},
        {"precision": "float32", "length": 256, "checkpointed": True},
        {"precision": "float32", "length": 128, "family": "qwen3_moe", "experts": 4, "mlp": 128},
    ],
    ids=["float32", "bfloat16", "checkpointed", "experts"],
)
def test_the_peak_of_a_small_step_is_planned_within_a_tenth(bench, options):
    peak = bench.measure(bench.Case(**{"hidden": 192, "mlp": 512, "vocabulary": 2048} | options))

    assert abs(peak.error) <= BOUND, f"measured {peak.measured:,.0f} bytes, planned {peak.planned:,.0f}"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_a_critic_holds_is_planned_within_a_tenth_and_so_are_the_weights_of_a_teacher(bench, precision):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    case = bench.Case(hidden=192, layers=3, mlp=512, vocabulary=2048, length=128, rollouts=2, precision=precision)
    config = bench._make_config(case)
    config.num_labels, config.pad_token_id = 1, 0
    dtype, batch = bench.DTYPES[precision], make_full_rollouts(4, 128, 2048)
    size = ModelSize.from_config("llama", config.to_dict())
    setup = LearnerSetup(tokens=256, longest=128, compute_bytes=dtype.itemsize, weight_bytes=4)

    critic = BesideModel(name="critic", model=without_output(size), setup=setup, learns=True)
    network = ValueNetwork(AutoModelForSequenceClassification.from_config(config).eval(), precision=dtype)
    learner = make_torch_learner(network, Sampling(), train_tokens=256)

    def step() -> None:
        learner.forward_backward_local(batch, lambda outputs, batch: (outputs.values.square().sum(), {}))
        learner.step()

    step()
    state = [value for values in learner.optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    held = sum(each.nbytes for each in (*network.model.parameters(), *state))
    assert critic.held == pytest.approx(held, rel=BOUND)
    peak = measure_peak(step, torch.device("cpu"))
    assert critic.held + sum(critic.training.values()) == pytest.approx(held + peak, rel=BOUND)

    frozen = AutoModelForCausalLM.from_config(config).to(dtype).requires_grad_(False)
    teacher = BesideModel(name="teacher", model=size, setup=replace(setup, weight_bytes=dtype.itemsize, trained_share=0.0))
    assert teacher.held == pytest.approx(sum(each.nbytes for each in frozen.parameters()), rel=BOUND)
    scorer = Network(frozen.eval(), precision=dtype)

    def score() -> None:
        with torch.no_grad():
            for _ in range(2):
                scorer.outputs(make_full_rollouts(2, 128, 2048), Sampling())

    assert teacher.scoring == pytest.approx(measure_peak(score, torch.device("cpu")), rel=0.35)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_what_leaves_a_device_and_what_a_checkpoint_copies_are_planned_within_a_tenth(bench, weights):
    from transformers import AutoModelForCausalLM

    case = bench.Case(hidden=192, layers=3, mlp=512, vocabulary=2048, length=64, precision="bfloat16", weights=weights)
    model = AutoModelForCausalLM.from_config(bench._make_config(case)).eval()
    network = Network(model, precision=torch.bfloat16)
    cast_weights(model, bench.DTYPES[weights])
    learner = make_torch_learner(network, Sampling(), train_tokens=64)
    learner.forward_backward_local(make_full_rollouts(1, 64, 2048), make_algorithm("grpo", {}).losses(0)["policy"])
    learner.step()
    size = ModelSize.from_config("llama", bench._make_config(case).to_dict())
    setup = LearnerSetup(tokens=64, longest=64, compute_bytes=2, weight_bytes=bench.DTYPES[weights].itemsize)
    planned = LearnerFootprint(size, setup)

    moved = [tensors[0] for part in (learner.state_offload, learner.weight_offload) for tensors in part._group_by_memory()]
    assert planned.static == pytest.approx(sum(each.untyped_storage().nbytes() for each in moved), rel=BOUND)
    snapshot: Any = learner.stage()
    copied = sum(shard.tensor.nbytes for shards in (snapshot.weights, snapshot.optimizer) for shard in shards.values())
    assert planned.weights + planned.optimizer == pytest.approx(copied, rel=BOUND)


def test_the_plan_counts_with_the_sizes_that_the_models_use():
    """The plan imports no torch, so it has them as numbers."""
    kernels = {planned: kernel_choice.PLAIN_SCORES["cpu", dtype] for planned, dtype in ((4, torch.float32), (2, torch.bfloat16))}

    assert kernels == learner_memory.PLAIN_SCORES
    assert learner_memory.EAGER_SCORES == attention_plan.MAX_EAGER_SCORES
    assert learner_memory.MOST_KEPT_LOGITS == token_logprobs.MOST_KEPT_LOGITS
    assert (learner_memory.TILE_ROWS, learner_memory.TILE_COLUMNS) == (lm_head.CPU_ROWS, lm_head.CPU_COLUMNS)


def test_shards_divide_weights_gradients_and_optimizer():
    whole, sharded = (LearnerFootprint(MODEL, replace(SETUP, sharding=Sharding(shards=shards))) for shards in (1, 8))

    assert sharded.static == pytest.approx(whole.static / 8)
    assert sharded.gradients == pytest.approx(whole.gradients / 8)
    assert sharded.activations == whole.activations


def test_checkpointed_layers_keep_their_inputs_alone():
    kept, recomputed = (LearnerFootprint(MODEL, replace(SETUP, checkpointed_share=share)) for share in (0.0, 1.0))

    assert recomputed.activations == 32 * 8192 * 4096 * 4
    assert recomputed.training_peak < kept.training_peak


def test_experts_are_divided_over_their_ranks_and_the_rest_is_not():
    values = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    model = ModelSize.from_config("mixtral", values)
    one, four = (LearnerFootprint(model, replace(SETUP, sharding=Sharding(expert=expert))) for expert in (1, 4))

    assert one.rank_weights - four.rank_weights == pytest.approx(0.75 * model.expert_weights)
    assert model.expert_weights == pytest.approx(32 * 8 * 3 * 4096 * 14336)


def test_experts_of_the_torch_learner_are_divided_once():
    """Over all ranks of a copy, whatever the number of expert ranks."""
    values = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    model = ModelSize.from_config("mixtral", values)
    choices = (ParallelSizes(expert=expert) for expert in (1, 4, 8))
    found = [LearnerFootprint(model, replace(SETUP, sharding=choice.shard(16, megatron=False))) for choice in choices]

    assert len({each.rank_weights for each in found}) == 1
    assert found[0].gathered > found[1].gathered > found[2].gathered


def test_optimizer_of_megatron_experts_is_divided_over_the_ranks_that_have_the_same():
    values = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    model = ModelSize.from_config("mixtral", values)
    few, many = (
        LearnerFootprint(model, replace(SETUP, sharding=ParallelSizes(expert=8).shard(ranks, megatron=True))) for ranks in (8, 16)
    )

    assert few.rank_states > model.expert_weights / 8
    assert many.rank_states == pytest.approx(few.rank_states / 2)
    assert many.rank_weights == few.rank_weights


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages():
    one, four = (LearnerFootprint(MODEL, replace(SETUP, sharding=Sharding(stages=stages))) for stages in (1, 4))

    assert four.activations == pytest.approx(one.activations)
