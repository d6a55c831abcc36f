"""Whole runs on the simulated GPU train as they do on a CPU, to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loop.kinds import train
from loop.runs import metrics_of, repeatable
from strop.data.packing_config import LARGEST_TOKENS
from support.simulated_device import find_obstacle
from support.simulated_device.in_process import compute_as_a_gpu, compute_on_simulated_gpu
from support.sweep import sweep

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_obstacle() is not None, reason=str(find_obstacle()))]

STEPS = 3
PLAIN = {"policy.attention_kernel": "plain"}  # auto chooses by device
SAMPLED = {
    "policy.generation.backend": "torch",
    "policy.generation.torch_cfg.kv_cache_memory_gb": 0.01,
    "policy.generation.torch_cfg.prepack_weights": False,  # the layout of a CPU, and its kernels
    "policy.generation.torch_cfg.compiled_kernels": False,
    "policy.generation.torch_cfg.paged_cache": False,  # a GPU has fixed slots
    # A graph attends over whole slots, and pads its batch to a power of two. Here a CPU computes in these shapes too: its spans are
    # multiples of 32, and two sequences are never padded.
    "policy.max_total_sequence_length": 32,
    "data.max_input_seq_length": 28,
    "policy.generation.torch_cfg.max_num_seqs": 2,
}


@pytest.mark.parametrize("section", sweep(["grpo", "sft", "dpo"], "grpo"))
def test_a_run_on_the_simulated_gpu_trains_as_on_the_cpu_to_the_last_digit(section: str, tiny: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {f"{section}.max_num_steps": STEPS, **PLAIN}
    changes |= SAMPLED if section == "grpo" else {}
    found = {}
    for device, before in (("cpu", compute_as_a_gpu), ("auto", compute_on_simulated_gpu)):
        outcome = train(section, tiny, tmp_path / device, before=before, **changes, **{"policy.device": device})
        assert outcome.code == 0, outcome.err
        found[device] = repeatable(metrics_of(tmp_path / device / "logs"))
    said = outcome.out + outcome.err
    assert "sim" in said and "without CUDA graphs" not in said
    assert len(found["cpu"]) >= STEPS and found["auto"].keys() == found["cpu"].keys()
    for step, wanted in found["cpu"].items():
        metrics = found["auto"][step]
        both = {name: (metrics.get(name), wanted.get(name)) for name in metrics.keys() | wanted.keys()}
        differing = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
        assert differing == {}, step


def test_a_run_by_defaults_measures_what_fits_and_reads_a_step_in_one_micro_batch(tiny: Path, tmp_path: Path) -> None:
    """And logs the size before that, with its reason."""
    left: dict[str, Any] = {"policy.train_micro_batch_size": ..., "grpo.max_num_steps": 2, "logger.console": "plain"}
    outcome = train("grpo", tiny, tmp_path, before=compute_on_simulated_gpu, **SAMPLED, **left, **{"policy.device": "auto"})
    assert outcome.code == 0, outcome.err
    said = outcome.out + outcome.err
    assert "micro-batch as many tokens as fit into memory, at most 32768, measured at the start (default on a GPU)" in said
    assert f"policy.sequence_packing.train_mb_tokens: auto is {LARGEST_TOKENS} tokens" in said
    tokens = [line["train/total_tokens"] for step, line in metrics_of(tmp_path / "logs").items() if step]
    assert len(tokens) == 2 and max(tokens) < LARGEST_TOKENS
