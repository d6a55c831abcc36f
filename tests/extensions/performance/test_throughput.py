"""Tokens a second of each device, and the share of its arithmetic that training uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strop.extensions.performance.devices import DecoderDimensions, LayerDimensions, PassCounts, forward_flops, training_flops
from strop.extensions.performance.performance import Throughput, TrainingPasses, count_batch

LAYER = LayerDimensions(attention=400, mlp=600, resident=600, query_width=8, value_width=8, cache_width=16)
MODEL = DecoderDimensions(hidden=10, vocabulary=50, tied=True, layers=(LAYER, LAYER))
TIMING = {"performance/tokens_per_sec": 80.0, "timing/train/policy_training": 2.0}


def make_batch() -> Any:
    """A prompt of three tokens and two completions that share it, of two tokens each, as they are packed."""
    return SimpleNamespace(
        tokens=torch.zeros(7),
        positions=torch.tensor([0, 1, 2, 3, 4, 3, 4]),
        target=torch.zeros(4),
        sequence=torch.tensor([0, 0, 1, 1]),
    )


def test_a_shared_prompt_is_counted_once_and_attended_to_by_both() -> None:
    assert count_batch(make_batch(), MODEL) == PassCounts(read=7, predicted=4, pairs={None: 1 + 2 + 3 + 4 + 5 + 4 + 5})
    windowed = DecoderDimensions(hidden=10, vocabulary=50, tied=True, layers=(LayerDimensions(**{**vars(LAYER), "window": 2}),))
    assert count_batch(make_batch(), windowed).pairs == {2: 1 + 6 * 2}


def test_mfu_is_the_arithmetic_of_training_over_the_peak_of_the_devices_that_train() -> None:
    throughput = Throughput(devices=8, training_devices=4, model=MODEL, peak_flops=1e6)
    found = throughput.metrics(make_batch(), TrainingPasses(), TIMING)
    flops = training_flops(MODEL, count_batch(make_batch(), MODEL))
    assert found["perf/tokens_per_sec_per_gpu"] == 10.0
    assert found["perf/model_tflops_per_gpu"] == pytest.approx(flops / 2.0 / 4 / 1e12)
    assert found["perf/mfu"] == pytest.approx(flops / 2.0 / 4 / 1e6)


def test_what_is_not_known_is_left_out() -> None:
    passes = TrainingPasses()
    assert set(Throughput(devices=1, training_devices=1).metrics(make_batch(), passes, TIMING)) == {"perf/tokens_per_sec_per_gpu"}
    on_cpu = Throughput(devices=1, training_devices=1, model=MODEL).metrics(make_batch(), passes, TIMING)
    assert set(on_cpu) == {"perf/tokens_per_sec_per_gpu", "perf/model_tflops_per_gpu"}


def test_rollouts_without_a_gradient_and_further_passes_count_as_what_they_are() -> None:
    throughput, batch = Throughput(devices=1, training_devices=1, model=MODEL), make_batch()
    counts = count_batch(batch, MODEL)
    forward, trained = forward_flops(MODEL, counts), training_flops(MODEL, counts)
    half = TrainingPasses(zero_gradient=torch.tensor([True, False]))
    assert throughput.count_flops(batch, half) == 0.5 * trained + 0.5 * forward
    twice = TrainingPasses(epochs=2, scored_before=True)
    assert throughput.count_flops(batch, twice) == 2 * trained + forward
