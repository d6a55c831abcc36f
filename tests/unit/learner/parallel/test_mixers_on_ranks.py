"""Recurrent layers and sparse attention on ranks: training is that of one process, in float64."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.learner.parallel.test_sharded_checkpoint import ONE, Form, differences, learner_of, whole_state
from tests.unit.learner.parallel.test_sharded_checkpoint import train as train_by_hand

from strop.learner.parallel.export.sharded_export import iter_sharded_weights
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.tensor_mixers import Section, rows_of_rank
from strop.models.mixers.indexers import pack_bits
from strop.models.network import Network
from strop.models.routing.router_config import CHOICES
from strop.types import Batch
from support.every_family import make_config
from support.models import CONFIGS
from support.parity import Case, TrainingResult, compare, make_batch, shorter, train
from support.ranks import run_on_ranks
from support.sharded import Float64Torch
from support.sweep import sweep

pytestmark = pytest.mark.slow

DIVIDED = (
    "qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "nemotron_h", "granite_hybrid", "falcon_h1", "bamba", "mamba2", "mamba",
    "falcon_mamba", "jamba", "lfm2",
)  # fmt: skip
MIXERS = "mixers/"  # before the name of a family
SHARDED, STAGES = ParallelDims(shard=2), ParallelDims(pipeline=2)
TENSOR, CONTEXT = ParallelDims(tensor=2), ParallelDims(context=2)
SEQUENCE = ParallelDims(tensor=2, sequence=True)
BOTH = ParallelDims(shard=2, tensor=2)
MIXTURES = ("qwen3_next", "qwen3_5_moe", "kimi_linear", "nemotron_h", "granite_hybrid", "lfm2_moe", "deepseek_v32", "glm_moe_dsa")
EVERY = (*MIXTURES, "qwen3_5", "olmo_hybrid", "falcon_h1", "bamba")
KINDS = {
    "shards": (SHARDED, EVERY),
    "context": (CONTEXT, EVERY),
    "stages": (STAGES, EVERY),
    "experts": (ParallelDims(shard=2, expert=2), MIXTURES),
}


@dataclass(frozen=True)
class MixerCase:
    """A family on ranks, with changes of its configuration and options of the training."""

    family: str
    sizes: ParallelDims
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    replayed: int = 0  # the choices of indexers for each token
    block: int = 1  # tokens that are chosen together


RECORDED = {
    "deepseek_v32": (3, 1),
    "glm_moe_dsa": (2, 1),
    "deepseek_v4": (2, 2),
    "minimax_m3": (4, 4),
}  # choices, tokens of a block
LORA: Mapping[str, Any] = {"lora": True, "rate": 1e-3}
RECOMPUTED: Mapping[str, Any] = {"checkpointing": True}
TWO_GROUPS, SCALED = {"mamba_n_groups": 2, "mamba_rms_norm": True, "num_key_value_heads": 4}, {"embedding_multiplier": 3.0}
CASES = {
    "recomputed": MixerCase("qwen3_5", SHARDED, options=RECOMPUTED),
    "lora": MixerCase("qwen3_5", SHARDED, options=LORA),
    "mamba, context": MixerCase("jamba", CONTEXT),
    "mamba alone, recomputed": MixerCase("falcon_mamba", SHARDED, options=RECOMPUTED),
    "scaled embeddings, stages": MixerCase("granite_hybrid", STAGES, SCALED),
    "layers that return tuples, stages": MixerCase("falcon_h1", STAGES, SCALED),
    **{f"{family}, {kind}": MixerCase(family, sizes) for kind, (sizes, families) in KINDS.items() for family in families},
    **{f"{family}, stages": MixerCase(family, STAGES) for family in ("mamba", "falcon_mamba", "mamba2", "lfm2", "jamba")},
    **{f"{family}, tensor": MixerCase(family, TENSOR) for family in ("zamba", "zamba2")},
    "zamba2, context": MixerCase("zamba2", CONTEXT),
    **{f"{family}, tensor": MixerCase(family, TENSOR) for family in DIVIDED},
    **{f"{family}, sequence": MixerCase(family, SEQUENCE) for family in DIVIDED if family != "kimi_linear"},
    **{f"{family}, tensor, lora": MixerCase(family, TENSOR, options=LORA) for family in ("qwen3_5", "nemotron_h", "jamba")},
    "sequence, lora, recomputed": MixerCase("qwen3_next", SEQUENCE, options={**LORA, **RECOMPUTED}),
    "tensor, muon": MixerCase("qwen3_5", TENSOR, options={"optimizer": "strop.learner.muon.Muon"}),
    "tensor, groups and biases": MixerCase("nemotron_h", TENSOR, {"n_groups": 2, "use_bias": True}),
    "tensor, biases, lora": MixerCase("mamba2", TENSOR, {"use_bias": True}, LORA),
    "tensor, biases of convolutions": MixerCase("lfm2", TENSOR, {"conv_bias": True}),
    "tensor, norm before gate": MixerCase("falcon_h1", TENSOR, {"mamba_rms_norm": True}),
    "tensor, norm of groups": MixerCase("falcon_h1", TENSOR, TWO_GROUPS),
    "shards, tensor": MixerCase("qwen3_5", BOTH),
    "shards, sequence, lora": MixerCase("nemotron_h", ParallelDims(shard=2, tensor=2, sequence=True), options=LORA),
    "shards, tensor, recomputed": MixerCase("granite_hybrid", BOTH, options=RECOMPUTED),
    "a key head for two ranks": MixerCase("qwen3_5", ParallelDims(tensor=4), {"num_key_value_heads": 4}),
    "a group for two ranks": MixerCase("falcon_h1", ParallelDims(tensor=4), TWO_GROUPS),
    "context, tensor": MixerCase("jamba", ParallelDims(context=2, tensor=2)),
    "stages, tensor": MixerCase("qwen3_5", ParallelDims(pipeline=2, tensor=2)),
    "experts, tensor": MixerCase("qwen3_next", ParallelDims(shard=2, tensor=2, expert=4)),
    "indexers, recomputed": MixerCase("glm_moe_dsa", SHARDED, options=RECOMPUTED),
    "indexers, tensor": MixerCase("deepseek_v32", TENSOR),
    "indexers, ring": MixerCase(
        "deepseek_v32", CONTEXT, {"num_attention_heads": 3, "num_key_value_heads": 3}
    ),  # which do not divide
    "indexers, lora": MixerCase("deepseek_v32", SHARDED, options=LORA),
    "indexers, context, replayed": MixerCase("glm_moe_dsa", CONTEXT, replayed=2),
    "indexers, sequence, replayed": MixerCase("deepseek_v32", SEQUENCE, replayed=3),
    "gemma 4, recomputed": MixerCase("gemma4", SHARDED, options=RECOMPUTED),
    "gemma 4, tensor": MixerCase("gemma4", TENSOR),
    "gemma 4, context": MixerCase("gemma4", CONTEXT),
    "gemma 4, stages": MixerCase("gemma4_moe", STAGES),
    "gemma 4, experts": MixerCase("gemma4_moe", ParallelDims(shard=2, expert=2)),
}
KEPT = (  # each way to divide, and of each kind of mixer one
    "mamba, context", "layers that return tuples, stages", "lfm2, sequence", "tensor, biases, lora", "indexers, context, replayed",
)  # fmt: skip


def compute_in_float64(network: Network) -> None:
    """Let modeling code compute in float64 where it asks for float32, for the rest of this process."""
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda values: values if values.dtype == torch.float64 else narrow(values)  # type: ignore[assignment, method-assign]
    for module in network.model.modules():
        code: Any = sys.modules[type(module).__module__]
        if code.__name__.startswith("transformers.models."):
            code.torch = Float64Torch()
    network.model.config.get_text_config()._experts_implementation = "eager"


def replay_choices(network: Network) -> None:
    compute_in_float64(network)
    network.enable_indexer_replay(64)


def record_choices(batch: Batch, layers: int, block: int) -> Batch:
    """As if an engine had chosen any tokens or blocks for most tokens, always with the token itself."""
    drawn = torch.rand(len(batch.tokens), layers, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    drawn.scatter_(2, batch.positions[:, None, None].expand(-1, layers, 1) // block, True)
    choices = pack_bits(drawn.flatten(0, 1), 8).unflatten(0, (-1, layers))
    choices[::7] = 0  # nothing was recorded
    return replace(batch, read_columns={CHOICES.name: choices})


def train_both_ways(rank: int, wanted: MixerCase) -> tuple[TrainingResult, TrainingResult | None, int]:
    sizes, family = wanted.sizes, MIXERS + wanted.family
    CONFIGS[family] = partial(make_config, wanted.family, **wanted.changes)
    change = replay_choices if wanted.replayed else compute_in_float64
    case = shorter(Case(sizes=sizes, family=family, branches=True, change=change, **wanted.options))
    batch = make_batch(case)
    if wanted.replayed:
        batch = record_choices(batch, wanted.replayed, wanted.block)
    trained = train(case, batch, DeviceMeshes(sizes, "cpu"))
    return trained, train(replace(case, checkpointing=False), batch) if rank == 0 else None, len(batch.target)


def check_on_ranks(case: MixerCase) -> None:
    ranks = run_on_ranks(case.sizes.world_size, train_both_ways, case)
    single, size = ranks[0][1], ranks[0][2]
    assert single is not None
    found = compare([trained for trained, _, _ in ranks], single, size)
    assert found.loss < 1e-9 and found.norm < 1e-9 and found.outputs < 1e-6 and found.weights < 1e-9, found


@pytest.mark.parametrize("name", sweep(CASES, *KEPT))
def test_training_on_ranks_is_training_in_one_process(name: str) -> None:
    check_on_ranks(CASES[name])


FORM = Form(family=MIXERS + "nemotron_h")


def name_family() -> None:
    CONFIGS[FORM.family] = partial(make_config, "nemotron_h", n_groups=2)


def load_save_and_export(rank: int, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Size]]:
    name_family()
    learner = learner_of(FORM, TENSOR, seed=1)
    learner.load(folder / "one")
    learner.save(folder / "two")
    placement: Any = learner.parallelism
    exported = {weight.name: weight.gather() for weight in iter_sharded_weights(placement)}
    return whole_state(learner), exported, {name: tensor.shape for name, tensor in placement.local_parameters.items()}


def test_a_divided_mixer_is_saved_and_published_as_the_whole_one(tmp_path: Path) -> None:
    name_family()
    alone = learner_of(FORM, ONE)
    train_by_hand(alone)
    alone.save(tmp_path / "one")
    wanted = whole_state(alone)
    for state, exported, shapes in run_on_ranks(2, load_save_and_export, tmp_path):
        assert differences(state, wanted) == []
        weights = dict(alone.weights())
        assert list(exported) == list(weights)
        assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
        mixer = "model.layers.0.mixer."
        assert shapes[f"{mixer}in_proj.weight"][0] * 2 == len(weights[f"{mixer}in_proj.weight"])
        assert shapes[f"{mixer}out_proj.weight"][1] * 2 == weights[f"{mixer}out_proj.weight"].shape[1]
        assert shapes[f"{mixer}conv1d.weight"] == weights[f"{mixer}conv1d.weight"].shape
    again = learner_of(FORM, ONE, seed=1)
    again.load(tmp_path / "two")
    assert differences(whole_state(again), wanted) == []
    exchanged = rows_of_rank((Section(64, 8, "heads"), Section(32, 2, "groups"), Section(8, 8, "heads")), 1, 2)
    assert exchanged == [range(32, 64), range(80, 96), range(100, 104)]
