"""What a real engine does, whichever library it is of. The test modules of vLLM and of SGLang import these tests.

Their fixtures: ``room``; ``served``, an engine that can be told to go wrong; ``published``, after which it has the learner's weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.base import Completion, RequestTooLong
from strop.models.adapters import lora_layers
from strop.sampling import KEPT, Sampling, filtered_logits, keep_mask
from strop.weight_sync.base import Sender
from strop.weight_sync.exporter import LocalAdapterSource
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.verification import VerificationFailed
from support.vllm_engines import compute_logprobs, perturb

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_new_tokens=8)
ADAPTED = Sampling(temperature=0.8, max_new_tokens=8)
RANK = 12  # none that vLLM has kernels for


@pytest.fixture(autouse=True)
def same_weights_to_begin_with(served: ServedModel) -> None:
    """Many small changes add up to a model that ends every completion at once. The engine gets these by the next publish."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.normal_(0.0, 0.08) if parameter.dim() > 1 else parameter.fill_(1.0)


def publish(room: BackgroundLoop, served: ServedModel) -> dict[str, float]:
    metrics = room.run(served.weights.publish(served.weights.version + 1), seconds=600)
    return {name: metric.value for name, metric in metrics.items()}


def ask(
    room: BackgroundLoop, served: ServedModel, sampling: Sampling, seed: int = 1, prompt: tuple[int, ...] = PROMPT
) -> Completion:
    return room.run(served.pool.generate(prompt, sampling=sampling, seed=seed))


def disagreement(room: BackgroundLoop, served: ServedModel, sampling: Sampling = SAMPLING) -> float:
    completion = ask(room, served, sampling)
    return float((completion.logprobs - compute_logprobs(served.model, PROMPT, completion.tokens, sampling)).abs().max())


@contextmanager
def planted(room: BackgroundLoop, served: ServedModel, fault: str) -> Iterator[None]:
    """The engine's weights go wrong in one way; afterwards they are right again, and proven so."""
    call = getattr(served.engine, "_call_workers", None) or served.engine._call
    room.run(call("plant", fault))
    try:
        yield
    finally:
        room.run(call("plant", ""))
        publish(room, served)
        assert disagreement(room, served) < 2e-4


async def start_requests(served: ServedModel, sampling: Sampling, count: int, prompt: tuple[int, ...] = PROMPT) -> list[Any]:
    """Start requests, and return when all are sampled from: others of a single token, asked for after them, have been answered."""
    requests = [asyncio.create_task(served.pool.generate(prompt, sampling=sampling, seed=seed)) for seed in range(count)]
    await asyncio.sleep(0)  # so that they are sent before the others
    for seed in range(count, count + 2):
        await served.pool.generate(prompt, sampling=replace(sampling, max_new_tokens=1), seed=seed)
    return requests


async def while_running(
    served: ServedModel,
    sampling: Sampling,
    count: int,
    change: Callable[[], None],
    prompt: tuple[int, ...] = PROMPT,
    **options: Any,
) -> Any:
    """Publish a change of the weights while requests run. Returns what became of them."""
    before = served.weights.options
    served.weights.options = replace(before, in_flight=True, **options)
    try:
        requests = await start_requests(served, sampling, count, prompt)
        change()
        await served.weights.publish(served.weights.version + 1)
        return [await request for request in requests]
    finally:
        served.weights.options = before


# --- sampling -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24),
        Sampling(temperature=0.6, max_new_tokens=24),
        Sampling(temperature=1.3, top_k=7, max_new_tokens=24),
        Sampling(top_p=0.7, max_new_tokens=24),
        Sampling(min_p=0.2, max_new_tokens=24),
        Sampling(temperature=0.8, top_k=20, top_p=0.8, min_p=0.05, max_new_tokens=24),
        Sampling(temperature=0.0, max_new_tokens=24),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_that_sampled(
    room: BackgroundLoop, served: ServedModel, published: None, sampling: Sampling
) -> None:
    async def with_seeds() -> list[Completion]:
        return await asyncio.gather(*(served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(4)))

    for completion in room.run(with_seeds()):
        expected = compute_logprobs(served.model, PROMPT, completion.tokens, sampling)
        assert (completion.logprobs - expected).abs().max() < 2e-4


def test_equal_requests_give_equal_tokens_whoever_shares_the_batch(
    room: BackgroundLoop, served: ServedModel, published: None
) -> None:
    sampling = Sampling(max_new_tokens=16)
    alone = [ask(room, served, sampling, seed).tokens.tolist() for seed in range(6)]

    async def together() -> list[list[int]]:
        requests = [served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(6)]
        others = [served.pool.generate(PROMPT[:7], sampling=sampling, seed=seed) for seed in range(9)]
        return [completion.tokens.tolist() for completion in (await asyncio.gather(*requests, *others))[:6]]

    assert room.run(together()) == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_a_stop_token_ends_a_completion_and_belongs_to_it(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    free = ask(room, served, Sampling(max_new_tokens=30), seed=3)
    stop = int(free.tokens[4])
    stopped = ask(room, served, Sampling(max_new_tokens=30, stop_token_ids=(stop,)), seed=3)
    first = free.tokens.tolist().index(stop)
    assert stopped.stopped and stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert not ask(room, served, Sampling(max_new_tokens=2), seed=3).stopped


def test_a_stop_string_ends_a_completion_and_is_in_its_text(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    free = ask(room, served, Sampling(max_new_tokens=30), seed=5)
    letter = next(character for character in free.text[2:] if character.isascii() and character.isprintable())
    stopped = ask(room, served, Sampling(max_new_tokens=30, stop_strings=(letter,)), seed=5)
    assert stopped.stopped and letter in stopped.text
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()


def test_the_tokens_that_each_one_was_drawn_from_are_recorded(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    sampling = Sampling(temperature=0.9, top_k=12, top_p=0.9, record_sampling_mask=True, max_new_tokens=12)
    completion = ask(room, served, sampling)
    row = torch.cat([torch.tensor(PROMPT), completion.tokens])
    with torch.no_grad():
        logits = served.model(row[None]).logits[0, len(PROMPT) - 1 : -1]
    keep = keep_mask(logits / sampling.temperature, sampling)
    for place, kept in enumerate(completion.columns[KEPT]):
        assert set(kept[kept >= 0].tolist()) == set(keep[place].nonzero()[:, 0].tolist())
    assert torch.isfinite(filtered_logits(logits, sampling).gather(-1, completion.tokens[:, None])).all()


def test_a_later_turn_finds_its_conversation_in_the_prefix_cache(
    room: BackgroundLoop, served: ServedModel, published: None
) -> None:
    prompt = tuple(range(100, 180))

    async def turns() -> tuple[int, int]:
        first = await served.engine.sample_canary(prompt, sampling=SAMPLING, seed=1)
        later = (*prompt, *first.tokens.tolist(), 50, 51)
        return first.cached, (await served.engine.sample_canary(later, sampling=SAMPLING, seed=2)).cached

    first, second = room.run(turns())
    assert first == 0 and second >= 64


def test_a_prompt_that_cannot_fit_is_refused_with_what_to_set(room: BackgroundLoop, served: ServedModel, published: None) -> None:
    with pytest.raises(RequestTooLong, match="max_total_sequence_length"):
        ask(room, served, Sampling(max_new_tokens=4), prompt=tuple(range(256)))


# --- weights --------------------------------------------------------------------------------------------------------------------


def test_after_a_publish_the_engine_samples_from_the_new_weights(room: BackgroundLoop, served: ServedModel) -> None:
    for seed in range(3):
        perturb(served.model, seed)
        said = publish(room, served)
        assert disagreement(room, served) < 2e-4
        assert said["weights/tensors_not_read_back"] == 0
        assert said["weights/tensors_read_back"] == len(served.model.state_dict()) - 1, "all but the head, which is tied"
        assert said["weights/canary_error"] < 1e-4
        completion = ask(room, served, SAMPLING)
        assert completion.versions.tolist() == [served.weights.version] * len(completion.tokens)
    perturb(served.model, 11)
    assert disagreement(room, served) > 1e-2, "without a publish it disagrees, which is what the proof is for"


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


def check_fault(room: BackgroundLoop, served: ServedModel, fault: str, named: str) -> None:
    perturb(served.model, 300 + len(fault))
    with planted(room, served, fault), pytest.raises(VerificationFailed, match=named):
        publish(room, served)


def check_canary_alone(room: BackgroundLoop, served: ServedModel, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> dict[str, object]:
        return {}

    perturb(served.model, 400 + len(fault), size=0.05)
    with planted(room, served, fault), monkeypatch.context() as patched:
        patched.setattr(served.engine, "read_back_fingerprints", silent)
        with pytest.raises(VerificationFailed, match="disagree on the canary"):
            publish(room, served)


@pytest.mark.parametrize("recompute", [False, True], ids=["in place", "recomputed"])
def test_requests_that_run_go_on_with_the_new_weights_and_say_which_token_is_whose(
    room: BackgroundLoop, served: ServedModel, recompute: bool
) -> None:
    sampling, first = Sampling(max_new_tokens=150), served.weights.version
    completions = room.run(while_running(served, sampling, 8, lambda: perturb(served.model, 61), recompute=recompute))
    rows = [completion.versions.tolist() for completion in completions]
    assert all(row == sorted(row) and set(row) <= {first, first + 1} for row in rows)
    assert any(set(row) == {first, first + 1} for row in rows), "at least one was running"
    assert disagreement(room, served) < 2e-4
    if recompute:
        check_new_tokens(served, completions, sampling)


def check_new_tokens(served: ServedModel, completions: list[Completion], sampling: Sampling) -> None:
    """What is sampled after the change is sampled from the new model alone."""
    for completion in completions:
        expected = compute_logprobs(served.model, PROMPT, completion.tokens, sampling)
        new = completion.versions == served.weights.version
        assert ((completion.logprobs - expected)[new].abs() < 2e-4).all()


# --- adapters, by a fixture ``beside`` whose engine keeps the base ---------------------------------------------------------------


def move(model: Any, seed: int, size: float = 0.1) -> None:
    """Another policy: every adapter moved a little."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in (layer.down, layer.up):
                matrix.add_(size * torch.randn(matrix.shape, generator=noise))


def test_the_base_is_sent_once_and_the_adapters_each_time(room: BackgroundLoop, beside: ServedModel) -> None:
    weights = {weight.name: weight for weight in LocalAdapterSource(beside.model).base_weights()}
    del weights["lm_head.weight"]  # it is tied
    assert weights.keys() <= room.run(beside.engine.read_back_fingerprints()).keys()
    for seed in range(2):
        move(beside.model, seed)
        assert disagreement(room, beside, ADAPTED) > 1e-2, "without a publish it keeps the adapters of before"
        said = publish(room, beside)
        assert 0 < said["weights/bytes"] < sum(weight.spec.numel() * 4 for weight in weights.values()) / 2
        assert said["weights/canary_error"] < 1e-4
        assert disagreement(room, beside, ADAPTED) < 2e-4


def test_requests_that_run_go_on_with_the_new_adapters(room: BackgroundLoop, beside: ServedModel) -> None:
    sampling, first = replace(ADAPTED, max_new_tokens=150), beside.weights.version
    completions = room.run(while_running(beside, sampling, 3, lambda: move(beside.model, 61), recompute=True), seconds=600)
    assert any(set(completion.versions.tolist()) == {first, first + 1} for completion in completions), "at least one was running"
    check_new_tokens(beside, completions, sampling)
