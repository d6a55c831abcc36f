"""Families and their rotary embeddings in a real vLLM engine: the log-probabilities of Transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import publish
from support.every_family import build
from support.sweep import sweep
from support.vllm_engines import FAULTY, perturb
from support.vllm_families import DELTA, SERVED, compare_in_vllm, serve_family

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

NAMES = {" ".join(case): case for case in SERVED}


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(NAMES))
def test_an_engine_has_all_weights_and_samples_with_the_log_probabilities_of_transformers(
    case: str, room: BackgroundLoop, tmp_path: Path
) -> None:
    assert compare_in_vllm(room, *NAMES[case], tmp_path) < 1e-6


RECURRENT = {
    "granite_hybrid": (
        "float32",
        SERVED["granite_hybrid", "default"],
        ("mamba.conv1d.weight", "mamba.A_log", "mamba.in_proj.weight", "block_sparse_moe.router.weight"),
    ),
    "falcon_h1": ("bfloat16", SERVED["falcon_h1", "default"], ("mamba.conv1d.weight", "mamba.dt_bias")),
    "nemotron_h": ("float32", SERVED["nemotron_h", "default"], ("mixer.conv1d.weight", "mixer.A_log", "mixer.in_proj.weight")),
    "qwen3_next": ("bfloat16", DELTA, ("linear_attn.conv1d.weight", "linear_attn.A_log", "mlp.experts.gate_up_proj")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(RECURRENT))
def test_a_weight_of_a_recurrent_layer_that_does_not_arrive_is_named(name: str, room: BackgroundLoop, tmp_path: Path) -> None:
    precision, changes, weights = RECURRENT[name]
    model = build(name, **changes)
    served = serve_family(name, model, tmp_path, precision=precision, worker_extension=FAULTY)
    try:
        assert room.run(served.weights.publish(0))["weights/tensors_not_read_back"].number == 0
        for seed, weight in enumerate(weights):
            perturb(model, seed, 0.05)
            room.run(served.engine._call_workers("plant", f"drops model.layers.0.{weight}"))
            with pytest.raises(VerificationFailed, match=rf"model\.layers\.0\.{weight}"):
                publish(room, served)
        room.run(served.engine._call_workers("plant", ""))
        publish(room, served)
    finally:
        room.run(served.close())
