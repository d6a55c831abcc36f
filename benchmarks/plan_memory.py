"""The memory of a training step as torch's allocator counts it beside what ``strop plan`` computes, over small shapes on a CPU.

    python benchmarks/plan_memory.py                                     # all shapes; docs/planning.md has the worst
    python benchmarks/plan_memory.py --json memory.json

A step is the forward and backward passes of its micro-batches and the optimizer step, after a first one. Its peak is the most that the
allocator holds at once, with weights, master weights and the optimizer's state.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from strop.algorithm_factory import make_algorithm  # noqa: E402
from strop.extensions.planning.learner_memory import (  # noqa: E402
    LearnerFootprint,
    LearnerSetup,
    ModelSize,
    Sharding,
)
from strop.learner.budget.device_memory import measure_peak  # noqa: E402
from strop.learner.budget.memory_probe import make_full_rollouts  # noqa: E402
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims, to_local  # noqa: E402
from strop.learner.parallel.sharded import parallelize_network  # noqa: E402
from strop.models.loading import cast_weights  # noqa: E402
from strop.models.network import Network  # noqa: E402
from strop.sampling import Sampling  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its micro-batches."""

    family: str = "llama"
    layers: int = 2
    hidden: int = 256
    mlp: int = 704
    vocabulary: int = 4096
    heads: int = 4
    key_value_heads: int = 2
    rollouts: int = 1  # of a micro-batch
    length: int = 512
    precision: str = "float32"
    weights: str = "float32"
    checkpointed: bool = False
    micro_batches: int = 2
    experts: int = 0  # of a layer, of which a token is multiplied with two; ``mlp`` is the width of one
    ranks: int = 1  # that shard the model (FSDP2)
    expert: int = 1  # ranks with different experts, of those

    def __str__(self) -> str:
        checkpointed = ", checkpointed" if self.checkpointed else ""
        checkpointed += f"; {self.experts} experts" if self.experts else ""
        checkpointed += f"; {self.ranks} ranks" if self.ranks > 1 else ""
        checkpointed += f", experts over {self.expert}" if self.expert > 1 else ""
        return (
            f"{self.family} {self.layers} x {self.hidden}, MLP {self.mlp}, vocabulary {self.vocabulary}; {self.micro_batches} x "
            f"{self.rollouts} x {self.length} tokens; {self.precision}, weights {self.weights}{checkpointed}"
        )


@dataclass(frozen=True)
class Peak:
    """Bytes of a step."""

    case: Case
    measured: float
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def list_cases() -> list[Case]:
    """Return the grid: two dtypes of weights, shapes wide and deep, long and many rollouts."""
    shapes: Sequence[dict[str, object]] = (
        {},
        {"layers": 6, "hidden": 128, "mlp": 344, "vocabulary": 2048, "key_value_heads": 4},
        {"hidden": 512, "mlp": 1408, "vocabulary": 16384, "heads": 8},
        {"family": "qwen2", "layers": 4, "hidden": 384, "mlp": 1024, "vocabulary": 8192, "heads": 6},
    )
    batches: Sequence[dict[str, object]] = (
        {"precision": "float32"},
        {"precision": "float32", "rollouts": 4, "length": 256, "micro_batches": 1},
        {"precision": "float32", "rollouts": 2, "length": 1024, "checkpointed": True},
        {"precision": "bfloat16", "rollouts": 2, "length": 1024},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "weights": "bfloat16", "rollouts": 4, "length": 256},
    )
    sparse: dict[str, object] = {"family": "qwen3_moe", "mlp": 192, "experts": 8}
    alone = [{**shape, **batch} for shape in shapes for batch in batches]
    alone += [{**sparse, **batch} for batch in batches]
    divided: list[dict[str, object]] = [
        {**shape, **batch, "ranks": 2}
        for shape in (shapes[0], shapes[2], sparse)
        for batch in (batches[0], batches[2], batches[3])
    ]
    divided += [{**sparse, **batch, "ranks": 2, "expert": 2} for batch in (batches[0], batches[3])]
    return [Case(**case) for case in [*alone, *divided]]  # type: ignore[arg-type]


def measure(case: Case) -> Peak:
    """Train two steps of a model with random weights; measure the second, of several ranks on the one that holds the most."""
    from support.ranks import run_on_ranks

    measured = _measure_rank(0, case) if case.ranks == 1 else max(run_on_ranks(case.ranks, _measure_rank, case))
    shards = case.ranks
    sharding = Sharding(shards=shards, expert=case.expert, expert_shards=shards // case.expert)
    setup = LearnerSetup(
        tokens=case.rollouts * case.length,
        longest=case.length,
        compute_bytes=DTYPES[case.precision].itemsize,
        weight_bytes=DTYPES[case.weights].itemsize,
        checkpointed_share=float(case.checkpointed),
        micro_batches=case.micro_batches,
        sharding=sharding,
    )
    size = ModelSize.from_config(case.family, _make_config(case).to_dict())
    return Peak(case, measured, LearnerFootprint(size, setup).training_peak)


def _make_config(case: Case) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.key_value_heads,
        "tie_word_embeddings": False,
    }
    if not case.experts:
        return {"llama": LlamaConfig, "qwen2": Qwen2Config}[case.family](**sizes)
    return Qwen3MoeConfig(
        **sizes,
        head_dim=case.hidden // case.heads,
        num_experts=case.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=case.mlp,
        decoder_sparse_step=1,
    )


def _measure_rank(rank: int, case: Case) -> float:
    """Return the most bytes that a rank holds in the second step."""
    from transformers import AutoModelForCausalLM

    from support.learners import make_torch_learner

    torch.manual_seed(0)
    loss = make_algorithm("grpo", {}).losses(0)["policy"]
    tokens = case.rollouts * case.length
    batch = make_full_rollouts(case.rollouts * case.micro_batches * case.ranks, case.length, case.vocabulary)
    model = AutoModelForCausalLM.from_config(_make_config(case)).eval()
    network = Network(model, precision=DTYPES[case.precision])  # it is probed before its weights are rounded, as in a run
    placement = None
    if case.ranks > 1:
        dims = ParallelDims(shard=case.ranks, expert=case.expert)
        placement = parallelize_network(network, DeviceMeshes(dims, "cpu"), weights_dtype=DTYPES[case.weights])
    else:
        cast_weights(model, DTYPES[case.weights])
    learner = make_torch_learner(network, Sampling(), placement, activation_checkpointing=case.checkpointed, train_tokens=tokens)

    def step() -> None:
        learner.forward_backward_local(batch, loss)
        learner.step()

    step()
    state = [value for values in learner.optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    held = sum(to_local(each).nbytes for each in (*model.parameters(), *learner.masters.copies, *state))
    return held + measure_peak(step, torch.device("cpu"))


def make_table(peaks: Sequence[Peak]) -> Iterator[str]:
    yield "| shape | measured, MB | planned, MB | error |"
    yield "|---|---|---|---|"
    for peak in peaks:
        yield f"| {peak.case} | {peak.measured / 1e6:.1f} | {peak.planned / 1e6:.1f} | {peak.error:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers to a file")
    options = parser.parse_args()
    peaks = [measure(case) for case in list_cases()]
    print("\n".join(make_table(peaks)))
    print(f"within 10 %: {sum(abs(peak.error) <= 0.1 for peak in peaks)} of {len(peaks)}")
    if options.json is not None:
        rows = [{**asdict(peak.case), "measured": peak.measured, "planned": peak.planned} for peak in peaks]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
