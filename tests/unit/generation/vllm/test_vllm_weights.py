"""New weights in a real vLLM engine: they arrive, it is proven, and every way that engines have gone wrong is caught and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from strop.generation.vllm import vllm_engine
from strop.sampling import Sampling
from strop.weight_sync.base import Sender
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.verification import VerificationFailed
from support.vllm_engines import compute_logprobs, perturb

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture(autouse=True)
def same_weights_to_begin_with(served: ServedModel) -> None:
    """Many small changes add up to a model that ends every completion at once."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.normal_(0.0, 0.08) if parameter.dim() > 1 else parameter.fill_(1.0)


def publish(room: BackgroundLoop, served: ServedModel) -> dict[str, float]:
    published = room.run(served.weights.publish(served.weights.version + 1))
    return {name: metric.value for name, metric in published.items()}


@contextmanager
def planted(room: BackgroundLoop, served: ServedModel, fault: str) -> Iterator[None]:
    """The engine's worker goes wrong in one way; afterwards it is right again, and proven so."""
    room.run(served.engine._call_workers("plant", fault))
    try:
        yield
    finally:
        room.run(served.engine._call_workers("plant", ""))
        publish(room, served)


def disagreement(room: BackgroundLoop, served: ServedModel) -> float:
    completion = room.run(served.pool.generate(PROMPT, sampling=SAMPLING, seed=1))
    expected = compute_logprobs(served.model, PROMPT, completion.tokens, SAMPLING)
    return float((completion.logprobs - expected).abs().max())


def test_after_a_publish_the_engine_samples_from_the_new_weights(room: BackgroundLoop, served: ServedModel) -> None:
    for seed in range(3):
        perturb(served.model, seed)
        said = publish(room, served)
        assert disagreement(room, served) < 2e-4
        assert said["weights/tensors_not_read_back"] == 0
        assert said["weights/tensors_read_back"] == len(served.model.state_dict()) - 1, "all but the head, which is tied"
        assert said["weights/canary_error"] < 1e-4
        assert (
            room.run(served.pool.generate(PROMPT, sampling=SAMPLING, seed=1)).versions.unique().item() == served.weights.version
        )


def test_without_a_publish_the_engine_disagrees_which_is_what_the_proof_is_for(room: BackgroundLoop, served: ServedModel) -> None:
    perturb(served.model, 11)
    assert disagreement(room, served) > 1e-2
    publish(room, served)
    assert disagreement(room, served) < 2e-4


def test_negative_zeros_in_the_weights_are_no_fault(room: BackgroundLoop, served: ServedModel) -> None:
    with torch.no_grad():
        served.model.model.layers[0].mlp.up_proj.weight[3] = -0.0
    publish(room, served)


@pytest.mark.parametrize("transport", ["broadcast", "folder"])
def test_weights_arrive_by_every_transport(room: BackgroundLoop, served: ServedModel, transport: str, tmp_path: Path) -> None:
    senders: dict[str, Callable[[int], Sender]] = {
        "broadcast": lambda receivers: BroadcastSender(receivers, backend="gloo"),
        "folder": lambda receivers: FolderSender(tmp_path / "weights", receivers),
    }
    memory = served.export.make_sender
    try:
        room.run(served.weights.channel.close())
        served.export.make_sender = senders[transport]
        perturb(served.model, 21)
        publish(room, served)
        assert disagreement(room, served) < 2e-4
    finally:
        room.run(served.weights.channel.close())
        served.export.make_sender = memory
    publish(room, served)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("dropped tensor", r"layers\.1\.mlp\.down_proj\.weight"),
        (
            "swapped pair",
            r"layers\.[01]\.self_attn\.o_proj\.weight.*has the values of model\.layers\.[01]\.self_attn\.o_proj\.weight",
        ),
        ("stale tied head", r"lm_head\.weight \(tied to model\.embed_tokens\.weight\)"),
    ],
)
def test_a_planted_fault_is_caught_by_reading_back_and_the_tensor_named(
    room: BackgroundLoop, served: ServedModel, fault: str, named: str
) -> None:
    perturb(served.model, 300 + len(fault))
    with planted(room, served, fault), pytest.raises(VerificationFailed, match=named):
        publish(room, served)


@pytest.mark.parametrize("fault", ["dropped tensor", "swapped pair", "stale tied head"])
def test_the_canary_alone_catches_it_too(
    room: BackgroundLoop, served: ServedModel, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent() -> dict[str, object]:
        return {}

    perturb(served.model, 400 + len(fault), size=0.05)
    with planted(room, served, fault), monkeypatch.context() as patched:
        patched.setattr(served.engine, "read_back_fingerprints", silent)
        with pytest.raises(VerificationFailed, match="disagree on the canary"):
            publish(room, served)


def test_a_prefix_cache_of_the_weights_before_is_caught(
    room: BackgroundLoop, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keeps_its_cache(*, keep_running: bool) -> None:
        served.engine._resumed.clear()
        await served.engine._require_alive().pause_generation(mode="keep", clear_cache=False)

    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "_cache_salt", lambda: "always the same")
        publish(room, served)
        patched.setattr(served.engine, "pause", keeps_its_cache)
        perturb(served.model, 51)
        with pytest.raises(VerificationFailed, match="prefix cache"):
            publish(room, served)
    publish(room, served)


def test_the_salt_alone_keeps_prefixes_of_other_weights_apart(
    room: BackgroundLoop, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keeps_its_cache(*, keep_running: bool) -> None:
        served.engine._resumed.clear()
        await served.engine._require_alive().pause_generation(mode="keep", clear_cache=False)

    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "pause", keeps_its_cache)
        perturb(served.model, 52)
        publish(room, served)
        assert disagreement(room, served) < 2e-4


def test_a_publish_that_fails_half_way_leaves_no_generator_with_weights_of_any_version(
    room: BackgroundLoop, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "SHUTDOWN_SECONDS", vllm_engine.POLL_SECONDS)  # the engine does not die: waited for in vain
    before = served.weights.version
    with planted(room, served, "killed half way"):
        with pytest.raises(Exception, match="this worker fails in the middle"):
            publish(room, served)
        assert served.engine.version == -1 and served.weights.version == before

        async def waits() -> bool:
            request = asyncio.create_task(served.pool.generate(PROMPT, sampling=SAMPLING, seed=1))
            await asyncio.sleep(0.5)
            held = not request.done()
            request.cancel()
            return held

        assert room.run(waits()), "requests wait: nobody samples from weights of which nobody knows what they are"
        with pytest.raises(RuntimeError, match="holds those of version -1"):
            room.run(served.engine.resume(before))
    assert disagreement(room, served) < 2e-4


def test_requests_that_run_go_on_with_the_new_weights_and_say_which_token_is_whose(
    room: BackgroundLoop, served: ServedModel
) -> None:
    sampling = Sampling(max_new_tokens=150)

    async def in_flight() -> tuple[list[int], ...]:
        before = served.weights.options
        served.weights.options = replace(before, in_flight=True)
        try:
            requests = [asyncio.create_task(served.pool.generate(PROMPT, sampling=sampling, seed=seed)) for seed in range(8)]
            while not served.engine.counters()["running"]:
                await asyncio.sleep(0.02)
            perturb(served.model, 61)
            await served.weights.publish(served.weights.version + 1)
            return tuple([(await request).versions.tolist() for request in requests])
        finally:
            served.weights.options = before

    first = served.weights.version
    versions = room.run(in_flight())
    assert all(row == sorted(row) and set(row) <= {first, first + 1} for row in versions)
    assert any(set(row) == {first, first + 1} for row in versions), "at least one was running"
    assert disagreement(room, served) < 2e-4
