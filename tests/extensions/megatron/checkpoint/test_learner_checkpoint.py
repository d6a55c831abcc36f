"""Training goes on from a checkpoint as if it had not stopped: bit for bit in the same layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import metrics
from support.ranks import run_on_ranks

pytest.importorskip("megatron.core")

TOLERANCE = 1e-6  # of a weight, where the sums of another layout are in another order


def go_on(rank: int, root: str, value: bool) -> dict[str, Any]:
    from strop.extensions.megatron.checkpoint.hugging_face import read_hugging_face_weights
    from strop.extensions.megatron.megatron_config import MegatronSchedulerConfig
    from strop.extensions.megatron.weight_map import iter_weights
    from support.megatron_parity import MegatronCase, case, make_megatron_learner
    from support.parity import get_loss, make_batch

    def train(learner: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            learner.forward_backward_local(batch, get_loss(made.case))
            rates.append(metrics.to_floats(learner.step())["lr"])
        return rates

    def weights(learner: Any) -> dict[str, torch.Tensor]:
        learner.network.gather_weights()
        found = iter_weights(learner.network.stages, learner.network.hf_config)
        return {weight.name: weight.gather().clone() for weight in found}

    plain = case(family="qwen3", dtype=torch.float32, value=value)
    falling = MegatronSchedulerConfig(
        lr_decay_style="cosine",
        lr_decay_iters=8,
        lr_warmup_iters=1,
        start_weight_decay=0.1,
        end_weight_decay=0.2,
        weight_decay_incr_style="linear",
    )
    made = MegatronCase(case=plain, world=2, distributed=True, overlap=True, schedule=falling)
    other: dict[str, Any] = {"sizes": {"tp": 2}, "distributed": False, "overlap": False}
    if value:
        made, other = replace(made, sizes={"pp": 2}, distributed=False, overlap=False), {"sizes": {}, "distributed": True}
    batch, folder = make_batch(made.case), Path(root)
    learner = make_megatron_learner(made)
    train(learner, 2)
    before = weights(learner)
    staged = learner.stage()
    rates = train(learner, 1)
    staged.save(folder)  # of before that step
    wanted, distances = weights(learner), []
    for change in ({}, other):
        resumed = make_megatron_learner(replace(made, **change))
        resumed.load(folder)
        assert train(resumed, 1) == rates
        found = weights(resumed)
        distances.append(max((found[name] - wanted[name]).abs().max().item() for name in wanted))
    with pytest.raises(ValueError, match=r"saved by the torch learner.*strop export"):
        (folder / "torch" / "weights").mkdir(parents=True, exist_ok=True)
        learner.load(folder / "torch")
    config = learner.network.hf_config.__class__.from_pretrained(folder / "weights")
    stored = read_hugging_face_weights(folder / "weights" / "iter_0000000", config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored.items())
    return {"same": distances[0], "other": distances[1], "class": config.architectures}


def check(root: Path, value: bool, name: str) -> None:
    result = run_on_ranks(2, go_on, str(root), value)[0]
    assert result["class"] == [name] and result["same"] == 0.0 and result["other"] <= TOLERANCE
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {"weights/config.json", "weights/latest_checkpointed_iteration.txt"} <= files
    for folder in ("weights/iter_0000000", "optimizer"):
        assert {f"{folder}/{name}" for name in (".metadata", "metadata.json", "common.pt")} <= files


def test_the_third_step_is_the_same_after_a_save_and_a_load(tmp_path: Path) -> None:
    check(tmp_path, False, "Qwen3ForCausalLM")


@pytest.mark.exhaustive
def test_a_critic_goes_on_too(tmp_path: Path) -> None:
    check(tmp_path, True, "Qwen3ForSequenceClassification")
