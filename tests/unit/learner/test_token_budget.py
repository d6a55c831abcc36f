"""Micro-batches found from memory: the fit, the margin, what is measured, and what a learner does with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.data.packing_config import LARGEST_TOKENS, SequencePackingConfig
from strop.learner.budget.device_memory import DeviceMemoryFull, measure_free, measure_free_host, measure_peak
from strop.learner.budget.memory_probe import (
    MemoryProbe,
    MemoryTooSmall,
    choose_budget,
    count_later,
    fit_memory,
    fits_twice,
    make_full_rollouts,
    needs_more,
    take_worst,
)
from strop.learner.torch.learner import TorchLearner
from strop.models.network import Network
from strop.runs.restore import MeasuringWeights, find_budgets
from strop.sampling import Sampling
from support.algorithms import grpo
from support.learners import make_model_config
from support.models import build
from support.rollouts import pack_for, simple_groups

CPU = torch.device("cpu")
KEY = "policy.sequence_packing.train_mb_tokens"


def probe_of(
    tokens: int, peak: int, free: int = 1 << 40, *, device: str = "cpu", gradients: int = 0, later: int = 0
) -> MemoryProbe:
    return MemoryProbe(
        device=device, tokens=tokens, peak_bytes=peak, free_bytes=free, gradient_bytes=gradients, optimizer_bytes=later
    )


def automatic_learner(**options: Any) -> TorchLearner:
    config = make_model_config(**options)
    config = replace(config, sequence_packing=SequencePackingConfig(train_mb_tokens="auto", logprob_mb_tokens=20))
    return TorchLearner(Network(build("llama")), config, Sampling())


def test_two_passes_give_the_fixed_part_and_the_bytes_of_a_token() -> None:
    fit = fit_memory([probe_of(100, 1500), probe_of(200, 2500)])
    assert (fit.fixed_bytes, fit.bytes_per_token) == (500, 10)


@pytest.mark.parametrize("second", [probe_of(200, 1400), probe_of(200, 5000), probe_of(100, 1500)])
def test_a_fit_never_promises_more_than_the_larger_cost_of_a_token(second: MemoryProbe) -> None:
    """Less for more tokens, or a line that starts below zero, is noise: the memory is then in proportion to the tokens."""
    fit = fit_memory([probe_of(100, 1500), second])
    assert fit.fixed_bytes == 0 and fit.bytes_per_token == max(15, second.peak_bytes / second.tokens)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 4928), ("cuda", 7936)])
def test_what_fits_is_a_share_of_the_free_memory_without_the_fixed_part(device: str, tokens: int) -> None:
    probes = [probe_of(100, 1500, 100_000, device=device), probe_of(200, 2500, 100_000, device=device)]
    found = choose_budget(probes, longest=100, later_bytes=0, key=KEY)
    assert found.tokens == tokens and 500 + 10 * tokens <= found.usable_bytes < found.free_bytes


def test_memory_that_others_will_take_is_not_used() -> None:
    probes = [probe_of(100, 1000, 100_000), probe_of(200, 2000, 100_000)]
    assert choose_budget(probes, longest=100, later_bytes=50_000, key=KEY).tokens == 2496
    both = {"policy": probe_of(1, 1, gradients=10, later=20), "value": probe_of(1, 1, gradients=1, later=2)}
    assert count_later("policy", both, 1000) == 1000 + 22 + 1
    assert count_later("value", both, 1000) == 1000 + 22 + 10


def test_a_budget_is_at_least_one_rollout_and_at_most_the_largest() -> None:
    probes = [probe_of(100, 1000, 2100), probe_of(200, 2000, 2100)]
    assert choose_budget(probes, longest=100, later_bytes=0, key=KEY).tokens == 100, "64 would be the rounded number"
    plenty = [replace(probe, free_bytes=1 << 50) for probe in probes]
    assert choose_budget(plenty, longest=100, later_bytes=0, key=KEY).tokens == LARGEST_TOKENS


def test_too_little_memory_for_one_rollout_is_an_error_that_names_the_key_and_what_to_set() -> None:
    with pytest.raises(MemoryTooSmall) as error:
        choose_budget([probe_of(100, 1000, 1900)], longest=100, later_bytes=0, key=KEY)
    for text in (KEY, "100 tokens", "activation_checkpointing=true", "number of tokens"):
        assert text in str(error.value)


def test_the_smallest_rank_decides() -> None:
    worst = take_worst([probe_of(64, 1000, 5000), probe_of(64, 1200, 9000), probe_of(64, 900, 4000)])
    assert (worst.peak_bytes, worst.free_bytes) == (1200, 4000)


def test_twice_the_tokens_are_tried_only_where_they_fit() -> None:
    assert fits_twice(probe_of(100, 1000, 4000), 0)
    assert not fits_twice(probe_of(100, 1000, 4000), 100)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def machine(folder: Path, groups: str) -> tuple[Path, Path]:
    write(folder / "proc", meminfo="MemTotal:  4000 kB\nMemAvailable:  1000 kB\n")
    write(folder / "proc" / "self", cgroup=groups)
    return folder / "proc", folder / "cgroup"


def test_free_memory_is_what_the_kernel_can_give(tmp_path: Path) -> None:
    assert measure_free_host(*machine(tmp_path, "0::/none\n")) == 1000 * 1024
    assert measure_free(CPU) > 0


def test_limits_of_control_groups_and_of_their_parents_hold(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/pod/run\n")
    write(groups / "pod" / "run", memory__max="max", memory__current="700")
    write(groups / "pod", memory__max="900000", memory__current="700000", memory__stat="anon 1\ninactive_file 50000\n")
    assert measure_free_host(proc, groups) == 250_000


def test_limits_of_the_first_version_hold(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "4:memory:/run\n2:cpu:/other\n")
    write(groups / "memory" / "run", memory__limit_in_bytes="800000", memory__usage_in_bytes="300000")
    assert measure_free_host(proc, groups) == 500_000


def test_a_machine_that_tells_no_free_memory_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Set it to a number"):
        measure_free_host(tmp_path, tmp_path)


def test_the_peak_counts_what_is_held_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for _ in range(3):
            torch.zeros(1000).add(torch.ones(1000))  # three tensors at once, freed each time

    work()
    assert 12_000 <= measure_peak(work, CPU) <= 13_000
    assert capfd.readouterr().err == ""


def test_made_up_rollouts_predict_every_token_and_share_no_prefix() -> None:
    batch = make_full_rollouts(2, 5, 100)
    assert len(batch.tokens) == len(batch.target) == 10 and batch.num_groups == batch.num_sequences == 2
    assert batch.segment_length.tolist() == [5, 5] and batch.positions.tolist() == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_probe_leaves_no_trace_in_the_learner(checkpointing: bool) -> None:
    learner = automatic_learner(activation_checkpointing=checkpointing)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    random = torch.get_rng_state()
    probe = learner.probe_memory(2, 16)
    assert probe.tokens == 32 and probe.peak_bytes > 0 and probe.free_bytes > 0
    assert probe.optimizer_bytes == 2 * probe.gradient_bytes > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.parameters)
    assert torch.equal(random, torch.get_rng_state())


def test_the_same_pass_is_measured_alike_and_twice_the_tokens_take_more() -> None:
    learner = automatic_learner()
    first, second, larger = (learner.probe_memory(count, 32).peak_bytes for count in (1, 1, 2))
    assert first == second and 1.5 * first < larger < 2.5 * first


def test_recomputed_activations_are_seen() -> None:
    plain, recomputed = (automatic_learner(activation_checkpointing=each).probe_memory(4, 32) for each in (False, True))
    assert recomputed.peak_bytes < plain.peak_bytes


def test_a_learner_trains_with_the_budget_that_was_found_and_not_before() -> None:
    learner, batch = automatic_learner(), pack_for(simple_groups((4, (3, 5)), (6, (2, 7))), grpo())
    with pytest.raises(RuntimeError, match="train_mb_tokens is auto"):
        learner.forward_backward(batch, grpo().loss)
    learner.set_train_tokens(12)
    learner.forward_backward(batch, grpo().loss)
    found = [parameter.grad.clone() for parameter in learner.parameters]
    fixed = TorchLearner(Network(build("llama")), make_model_config(train_tokens=12, score_tokens=20), Sampling())
    fixed.forward_backward(batch, grpo().loss)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, fixed.parameters, strict=True))


def test_a_device_without_memory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batch = automatic_learner(), pack_for(simple_groups((4, (3, 5))), grpo())
    learner.set_train_tokens(640)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(learner.network, "outputs", full)
    with pytest.raises(DeviceMemoryFull) as error:
        learner.forward_backward(batch, grpo().loss)
    for text in (KEY, "640 tokens", "smaller number", "activation_checkpointing", "Tried to allocate"):
        assert text in str(error.value)
    with pytest.raises(DeviceMemoryFull, match="logprob_mb_tokens"):
        learner.evaluate_loss(batch, grpo().loss)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", [1, 2]), ("cuda", [1, 2, 4, 8, 16])])
def test_a_gpu_is_measured_up_to_8192_tokens_and_a_cpu_twice(device: str, wanted: list[int]) -> None:
    probed: list[int] = []

    class Learner:
        async def probe_memory(self, rollouts: int, length: int) -> MemoryProbe:
            probed.append(rollouts)
            held = 10**6 * min(rollouts * length, 4096)  # the output layer's, which stops growing
            return probe_of(rollouts * length, held + 1000 * rollouts * length, 1 << 40, device=device)

    learners: Any = {"policy": Learner()}
    found = asyncio.run(find_budgets(learners, {"policy": KEY}, 512, 0))["policy"]
    assert probed == wanted
    assert (found.bytes_per_token < 2000) == (device == "cuda")


def test_twice_the_tokens_are_not_tried_on_a_gpu_where_they_would_not_fit() -> None:
    probes = [probe_of(512, 1000, 10_000, device="cuda"), probe_of(1024, 2000, 10_000, device="cuda")]
    assert needs_more(probes, 0) and not needs_more(probes, 5001)


def test_a_budget_beside_an_engine_is_measured_once_when_it_first_sleeps() -> None:
    events: list[str] = []

    class Weights:
        async def yield_device(self) -> None:
            events.append("engines sleep, the learner returns")

        async def publish(self, version: int) -> Any:
            events.append(f"published {version}")
            return {}

    async def settle() -> None:
        events.append("measured")

    async def run() -> None:
        weights = MeasuringWeights(Weights(), settle)
        for version in range(3):
            await weights.publish(version)
            await weights.yield_device()

    asyncio.run(run())
    asleep = "engines sleep, the learner returns"
    assert events == ["published 0", asleep, "measured", "published 1", asleep, "published 2", asleep]
