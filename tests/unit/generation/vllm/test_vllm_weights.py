"""New weights in a real vLLM engine: they arrive, it is proven, and every way that engines have gone wrong is caught and named."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from strop.generation.vllm import vllm_engine
from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import (  # noqa: F401
    PROMPT,
    SAMPLING,
    check_canary_alone,
    check_fault,
    disagreement,
    planted,
    publish,
    same_weights_to_begin_with,
    test_after_a_publish_the_engine_samples_from_the_new_weights,
    test_requests_that_run_go_on_with_the_new_weights_and_say_which_token_is_whose,
    test_weights_arrive_by_every_transport,
)
from support.vllm_engines import perturb

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


def test_negative_zeros_in_the_weights_are_no_fault(room: BackgroundLoop, served: ServedModel) -> None:
    with torch.no_grad():
        served.model.model.layers[0].mlp.up_proj.weight[3] = -0.0
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
    check_fault(room, served, fault, named)


@pytest.mark.parametrize("fault", ["dropped tensor", "swapped pair", "stale tied head"])
def test_the_canary_alone_catches_it_too(
    room: BackgroundLoop, served: ServedModel, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_canary_alone(room, served, fault, monkeypatch)


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
