"""A real SGLang engine answers as every generator does, takes weights that are proven, and comes back when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.base import Completion
from strop.sampling import Sampling, keep_mask
from strop.weight_sync.transports.connection import is_process_alive
from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import (  # noqa: F401
    PROMPT,
    SAMPLING,
    ask,
    check_canary_alone,
    check_fault,
    disagreement,
    planted,
    publish,
    same_weights_to_begin_with,
    start_requests,
    test_a_later_turn_finds_its_conversation_in_the_prefix_cache,
    test_a_prompt_that_cannot_fit_is_refused_with_what_to_set,
    test_a_stop_string_ends_a_completion_and_is_in_its_text,
    test_a_stop_token_ends_a_completion_and_belongs_to_it,
    test_after_a_publish_the_engine_samples_from_the_new_weights,
    test_equal_requests_give_equal_tokens_whoever_shares_the_batch,
    test_logprobs_are_those_of_the_distribution_that_sampled,
    test_requests_that_run_go_on_with_the_new_weights_and_say_which_token_is_whose,
    test_the_tokens_that_each_one_was_drawn_from_are_recorded,
    test_weights_arrive_by_every_transport,
)
from support.every_family import build, logprobs_alone, relative
from support.sglang_engines import LIMIT, TESTS, make_sglang_engine, needs_sglang
from support.vllm_engines import compute_logprobs, perturb, save_model_folder, serve, served_model
from support.vllm_families import SERVED

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
needs_sglang()

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


# --- sampling -------------------------------------------------------------------------------------------------------------------


def test_greedy_requests_keep_their_log_probabilities_in_a_batch_with_others(
    room: BackgroundLoop, served: ServedModel, published: None
) -> None:
    greedy, filtered = Sampling(temperature=0.0, max_new_tokens=24), Sampling(top_k=5, max_new_tokens=24)

    async def together() -> list[Completion]:
        requests = [served.pool.generate(PROMPT, sampling=(greedy, filtered)[seed % 2], seed=seed) for seed in range(8)]
        return list(await asyncio.gather(*requests))

    for seed, completion in enumerate(room.run(together())):
        expected = compute_logprobs(served.model, PROMPT, completion.tokens, (greedy, filtered)[seed % 2])
        assert (completion.logprobs - expected).abs().max() < 2e-4


def test_tokens_are_as_frequent_as_they_are_probable(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    """Chi-square of 600 first tokens among the 6 likeliest: 5 degrees of freedom, and 20.5 is exceeded once in a thousand."""
    sampling, count = Sampling(top_k=6, max_new_tokens=1), 600

    async def sample() -> list[int]:
        requests = [served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(count)]
        return [int(completion.tokens[0]) for completion in await asyncio.gather(*requests)]

    with torch.no_grad():
        logits = served.model(torch.tensor([PROMPT])).logits[0, -1]
    expected = logits.masked_fill(~keep_mask(logits, sampling), float("-inf")).softmax(-1)
    found = Counter(room.run(sample()))
    assert set(found) <= set(expected.nonzero()[:, 0].tolist())
    assert sum((found[token] - count * p) ** 2 / (count * p) for token, p in enumerate(expected.tolist()) if p > 0) < 20.5


def test_a_cancelled_request_ends_in_the_engine(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    """Sixteen run at a time: were the cancelled ones still running, the last request would wait for them."""

    async def cancel() -> float:
        long = Sampling(max_new_tokens=230, stop_token_ids=())
        tasks = await start_requests(served, long, 15)
        tasks += [asyncio.create_task(served.pool.generate(PROMPT, sampling=long, seed=seed)) for seed in range(15, 40)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        started = time.perf_counter()
        await served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=1), seed=1)
        return time.perf_counter() - started

    alone = min(_timed(lambda: ask(room, served, Sampling(max_new_tokens=1))) for _ in range(3))
    whole = _timed(lambda: room.run(_gather(served, 40)))
    assert room.run(cancel()) < max(0.5 * whole, 4 * alone)
    assert served.engine.counters()["running"] == 0


async def _gather(served: ServedModel, count: int) -> None:
    long = Sampling(max_new_tokens=230)
    await asyncio.gather(*(served.pool.generate(PROMPT, sampling=long, seed=seed) for seed in range(count)))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_the_server_answers_nobody_without_its_key(served: ServedModel) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    assert served.engine._client is not None
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{served.engine._client.address}/model_info", timeout=20)


# --- weights --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("dropped tensor", r"layers\.1\.mlp\.down_proj\.weight"),
        ("swapped pair", r"self_attn\.o_proj\.weight.*has the values of model\.layers\.[01]\.self_attn\.o_proj\.weight"),
        ("stale part of a fused matrix", r"layers\.0\.self_attn\.k_proj\.weight"),
        ("one changed number", r"layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_planted_fault_is_caught_by_reading_back_and_the_tensor_named(
    room: BackgroundLoop, served: ServedModel, fault: str, named: str
) -> None:
    check_fault(room, served, fault, named)


def test_the_canary_alone_catches_a_dropped_tensor_too(
    room: BackgroundLoop, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_canary_alone(room, served, "dropped tensor", monkeypatch)


def test_a_prefix_cache_of_the_weights_before_is_caught(
    room: BackgroundLoop, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keeps_its_cache() -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "_salt", lambda: "always the same")
        publish(room, served)
        patched.setattr(served.engine, "_flush", keeps_its_cache)
        perturb(served.model, 51)
        with pytest.raises(VerificationFailed, match="prefix cache"):
            publish(room, served)
    publish(room, served)


def test_a_publish_that_fails_half_way_leaves_no_generator_with_weights_of_any_version(
    room: BackgroundLoop, served: ServedModel
) -> None:
    before = served.weights.version
    with planted(room, served, "killed half way"):
        with pytest.raises(Exception, match="this rank fails in the middle"):
            publish(room, served)
        assert served.engine.version == -1 and served.weights.version == before
        with pytest.raises(RuntimeError, match="holds those of version -1"):
            room.run(served.engine.resume(before))
    assert disagreement(room, served) < 2e-4


def test_requests_that_are_given_up_during_a_publish_do_not_hold_it_up(
    room: BackgroundLoop, served: ServedModel, published: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended scheduler ends no request, so it counts those as running that nobody waits for any more."""
    load = served.engine.load

    async def in_flight() -> float:
        before = served.weights.options
        served.weights.options = replace(before, in_flight=True, recompute=False)
        long = Sampling(max_new_tokens=230, stop_token_ids=())
        requests = await start_requests(served, long, 8)

        async def give_up_and_load(*arguments: Any) -> Any:
            assert served.engine.counters()["running"] == 8
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            return await load(*arguments)

        monkeypatch.setattr(served.engine, "load", give_up_and_load)
        try:
            started = time.perf_counter()
            await served.weights.publish(served.weights.version + 1)
            return time.perf_counter() - started
        finally:
            served.weights.options = before

    assert room.run(in_flight()) < 30
    assert disagreement(room, served) < 2e-4


# --- faults ---------------------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_comes_back_with_its_weights_and_its_requests(
    room: BackgroundLoop, served: ServedModel, published: None
) -> None:
    sampling = Sampling(max_new_tokens=120)
    expected = [ask(room, served, sampling, seed).tokens.tolist() for seed in range(3)]

    async def kill() -> list[list[int]]:
        requests = await start_requests(served, sampling, 3)
        assert served.engine.process is not None
        os.kill(served.engine.process, signal.SIGKILL)
        return [(await request).tokens.tolist() for request in requests]

    assert room.run(kill(), seconds=LIMIT) == expected
    assert served.pool.restarts == 1 and disagreement(room, served) < 2e-4


def test_no_process_of_a_server_outlives_a_driver_that_is_killed(tmp_path: Path, tokenizer: Any) -> None:
    """The driver is killed while its server starts, and every process of its group ends."""
    folder = save_model_folder(served_model(), tokenizer, tmp_path / "model")
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "from pathlib import Path\n"
        "from strop.extensions.sglang.server_process import ServerProcess\n"
        "from support.sglang_engines import make_sglang_launch\n"
        f"print(ServerProcess(make_sglang_launch(Path({str(folder)!r}))).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        time.sleep(6)
        assert is_process_alive(server), (folder / "engine.log").read_text()[-2000:]
        driver.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _group_lives(server):
        time.sleep(0.2)
    assert not _group_lives(server)


def _group_lives(group: int) -> bool:
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout.splitlines()
    return any(row.split()[0] == str(group) and not row.split()[1].startswith("Z") for row in listed)


def test_an_argument_that_sglang_does_not_have_is_refused_with_the_nearest(
    room: BackgroundLoop, tmp_path: Path, tokenizer: Any
) -> None:
    folder = save_model_folder(served_model(), tokenizer, tmp_path / "model")
    engine = make_sglang_engine(folder, tokenizer)
    engine.launch = replace(engine.launch, config=replace(engine.launch.config, sglang_kwargs={"schedule_polcy": "lpm"}))
    with pytest.raises(ValueError, match="has no such argument; did you mean schedule_policy"):
        room.run(engine.start(), seconds=LIMIT)


def test_sglangs_own_sampler_reports_the_distribution_over_what_it_kept(
    room: BackgroundLoop, tmp_path: Path, tokenizer: Any
) -> None:
    """With another family of models, whose head is not tied."""
    model = served_model("qwen3", tied=False)
    folder = save_model_folder(model, tokenizer, tmp_path / "model")
    own = serve(model, tokenizer, [make_sglang_engine(folder, tokenizer, sampler="sglang")])
    try:
        said = room.run(own.weights.publish(0), seconds=LIMIT)
        assert said["weights/tensors_not_read_back"].value == 0
        for sampling in (Sampling(max_new_tokens=20), Sampling(temperature=0.8, top_k=9, max_new_tokens=20)):
            completion = ask(room, own, sampling)
            expected = compute_logprobs(model, PROMPT, completion.tokens, sampling)
            assert (completion.logprobs - expected).abs().max() < 2e-4
    finally:
        room.run(own.close())


def test_experts_arrive_by_the_names_of_checkpoints_and_are_named_if_they_do_not(
    room: BackgroundLoop, tmp_path: Path, tokenizer: Any
) -> None:
    model, plain = (build("qwen3_moe", **SERVED["qwen3_moe", "default"], moe_intermediate_size=32) for _ in range(2))
    folder = save_model_folder(model, tokenizer, tmp_path / "model")
    mixture = serve(model, tokenizer, [make_sglang_engine(folder, tokenizer, faulty=True)])
    try:
        said = room.run(mixture.weights.publish(0), seconds=LIMIT)
        assert said["weights/tensors_not_read_back"].value == 0
        found = ask(room, mixture, SAMPLING)
        with torch.no_grad():
            expected = logprobs_alone(plain, [([*PROMPT, *found.tokens.tolist()], len(PROMPT))])
        assert relative(found.logprobs, expected) < 1e-6
        for matrix in ("gate_up_proj", "down_proj"):
            check_fault(room, mixture, f"drops model.layers.1.mlp.experts.{matrix}", rf"layers\.1\.mlp\.experts\.{matrix}")
    finally:
        room.run(mixture.close())
