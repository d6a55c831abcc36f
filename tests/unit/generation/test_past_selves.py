"""Earlier selves of a policy: they sample with the weights that they had, whatever becomes of the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from strop.generation.torch.torch_past_selves import TorchPastSelves
from strop.models.network import Network
from strop.sampling import Sampling
from strop.weight_sync.in_process import SnapshotPool
from support.lora import build_with_adapters
from support.models import build
from support.torch_engine import Request, make_engine, make_runner, run_requests, token_lists

SAMPLING = Sampling(max_new_tokens=12)
PROMPTS = [[5, 40, 200, 31], [17, 300], [9, 9, 4]]


def change(model: torch.nn.Module, amount: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + amount)


def make_selves(network: Network, *, every: int = 1, size: int = 3) -> TorchPastSelves:
    return TorchPastSelves(network, lambda copied: make_engine(make_runner(copied)), every=every, size=size)


async def ask_all(selves: TorchPastSelves) -> list[list[int]]:
    """Ask every snapshot, mixed, and all at once."""
    try:
        asked = [(snapshot, prompt) for prompt in PROMPTS for snapshot in selves.pool.snapshots]
        completions = await asyncio.gather(*(selves.generate(each, prompt, sampling=SAMPLING, seed=3) for each, prompt in asked))
    finally:
        await selves.close()
    return token_lists(completions)


@pytest.mark.parametrize("lora", [False, True])
def test_each_self_samples_with_the_weights_that_it_had(lora: bool) -> None:
    network = Network(build_with_adapters("llama") if lora else build("llama"))
    selves = make_selves(network)
    expected: list[list[list[int]]] = []
    for version in range(2):
        change(network.model, 0.5 * version)
        selves.pool.take(version)
        engine = make_engine(make_runner(network))
        expected.append(token_lists(run_requests(engine, [Request(prompt, SAMPLING, 3) for prompt in PROMPTS])))
    change(network.model, -0.9)
    assert expected[0] != expected[1]
    assert asyncio.run(ask_all(selves)) == [expected[version][place] for place in range(3) for version in range(2)]


def test_what_is_not_trained_is_there_once() -> None:
    network = Network(build_with_adapters("llama"))
    selves = make_selves(network)
    copied = dict(selves.engine.runner.network.model.named_parameters())
    for name, parameter in network.model.named_parameters():
        assert (copied[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad), name


def test_the_newest_selves_are_kept_and_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    model = build("llama")
    pool = SnapshotPool(model, every=2, size=2)
    for version in (0, 1, 2, 3, 4, 4):
        change(model, 0.1)
        pool.take(version)
    assert [snapshot.version for snapshot in pool.snapshots] == [2, 4]
    pool.save(tmp_path / "past_selves")
    again = SnapshotPool(model, every=2, size=2)
    again.load(tmp_path / "past_selves")
    for one, other in zip(pool.snapshots, again.snapshots, strict=True):
        assert one.version == other.version and all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def test_a_checkpoint_without_earlier_selves_begins_with_the_present_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SnapshotPool(build("llama"), every=10, size=2)
    pool.load(tmp_path / "past_selves")
    pool.take(7)
    assert [snapshot.version for snapshot in pool.snapshots] == [7] and "kept from here on" in caplog.text


def test_selves_are_drawn_by_the_seed_alone() -> None:
    network = Network(build("llama"))
    selves = make_selves(network)
    for version in range(3):
        selves.pool.take(version)
    drawn = [(selves.draw(seed).generator.version, selves.draw(seed).quantile) for seed in range(200)]
    assert drawn == [(selves.draw(seed).generator.version, selves.draw(seed).quantile) for seed in range(200)]
    assert {version for version, _ in drawn} == {0, 1, 2} and 0.4 < sum(quantile for _, quantile in drawn) / 200 < 0.6


def test_a_request_that_fails_or_is_given_up_does_not_hold_up_the_others() -> None:
    network = Network(build("llama"))
    selves = make_selves(network)
    selves.pool.take(0)
    (snapshot,) = selves.pool.snapshots

    async def ask() -> list[object]:
        tasks = [
            asyncio.ensure_future(selves.generate(snapshot, prompt, sampling=SAMPLING, seed=3)) for prompt in ([], [5], [17, 300])
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await selves.close()
        return found

    empty, given_up, answered = asyncio.run(ask())
    assert isinstance(empty, ValueError) and isinstance(given_up, asyncio.CancelledError)
    assert len(answered.tokens) == 12  # type: ignore[attr-defined]


def test_what_was_cached_for_earlier_requests_is_read_again() -> None:
    """As it is in a run that was resumed in between."""
    selves = make_selves(Network(build("llama")))
    selves.pool.take(0)
    (snapshot,) = selves.pool.snapshots

    async def ask_twice() -> None:
        for _ in range(2):
            await asyncio.gather(*(selves.generate(snapshot, PROMPTS[0], sampling=SAMPLING, seed=seed) for seed in range(2)))
        await selves.close()

    asyncio.run(ask_twice())
    assert selves.engine.counters.prompt_tokens == 2 * len(PROMPTS[0])
