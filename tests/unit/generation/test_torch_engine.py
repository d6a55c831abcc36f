"""Continuous batching: what a request gets depends on the request alone, and slots, memory and weights are kept in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.generation.base import RequestTooLong
from strop.generation.torch.model_runner import CachedRunner, FixedSlots, RecomputeRunner, infer_cache_shape
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed
from support import torch_engine as support
from support.models import build
from support.sweep import one_in
from support.torch_engine import Request, cache_config, generate_all, make_engine, run_requests, token_lists

PROMPT = [5, 40, 200, 31, 7]

make_runner: Any = support.make_runner


@pytest.fixture(params=["slots", "pages"], autouse=True)
def cache(request: Any, monkeypatch: Any) -> str:
    """Everything holds with a cache of fixed slots and with a paged one."""
    if request.param == "pages":
        monkeypatch.setitem(globals(), "make_runner", support.make_paged_runner)
    return str(request.param)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(build("llama"))


def many_requests(count: int = 14) -> list[Request]:
    """Different prompts, lengths, options and seeds; some prompts are shared."""
    options = [Sampling(), Sampling(temperature=0.7), Sampling(top_k=20), Sampling(top_p=0.8), Sampling(temperature=0.0)]
    return [
        Request(
            [(7 * (place % 5) + 3 * step) % 300 + 4 for step in range(1 + 3 * (place % 5))],
            replace(options[place % len(options)], max_new_tokens=1 + 5 * place % 17),
            seed=mix_seed(3, place),
        )
        for place in range(count)
    ]


def alone(network: Network, request: Request, tokenizer: Any = None, **options: Any) -> Any:
    """One request on a fresh engine."""
    return run_requests(make_engine(make_runner(network, slots=1), tokenizer, **options), [request])[0]


@pytest.fixture(scope="module")
def one_at_a_time(network: Network) -> list[Any]:
    """With fixed slots."""
    return [run_requests(make_engine(support.make_runner(network, slots=1)), [request])[0] for request in many_requests()]


@pytest.mark.parametrize("slots", one_in(2, [1, 2, 3, 14]))
def test_many_requests_through_few_slots_equal_one_at_a_time(network: Network, one_at_a_time: list[Any], slots: int) -> None:
    """Finished slots are refilled and the last slot moves into the gap: none of it shows in what is sampled."""
    found = run_requests(make_engine(make_runner(network, slots=slots, prefix_tokens=20)), many_requests())
    assert token_lists(found) == token_lists(one_at_a_time)
    for left, right in zip(found, one_at_a_time, strict=True):
        assert torch.allclose(left.logprobs, right.logprobs, atol=1e-5)
        assert (left.stopped, left.text) == (right.stopped, right.text)


def test_requests_that_come_later_join_the_running_batch(network: Network, one_at_a_time: list[Any]) -> None:
    requests = many_requests()

    async def run() -> list[Any]:
        engine = make_engine(make_runner(network, slots=3))
        pending = []
        for request in requests:
            pending.append(
                asyncio.create_task(engine.generate(request.prompt, sampling=request.sampling, seed=request.seed, session=""))
            )
            for _ in range(3):
                await asyncio.sleep(0)
        found = await asyncio.gather(*pending)
        await engine.close()
        return list(found)

    assert token_lists(asyncio.run(run())) == token_lists(one_at_a_time)


def test_prompts_are_admitted_within_the_tokens_of_one_step(network: Network, one_at_a_time: list[Any]) -> None:
    found = run_requests(make_engine(make_runner(network, slots=14), prefill_tokens=8), many_requests())
    assert token_lists(found) == token_lists(one_at_a_time)


def test_a_finished_slot_is_refilled_at_once(network: Network) -> None:
    """One long request and many short ones share two slots: the short ones all run beside the long one."""
    engine = make_engine(make_runner(network, slots=2))
    short = [Request(PROMPT, Sampling(max_new_tokens=4), seed) for seed in range(5)]
    found = run_requests(engine, [Request(PROMPT, Sampling(max_new_tokens=25), 9), *short])
    assert [len(completion.tokens) for completion in found] == [25, 4, 4, 4, 4, 4]
    assert engine.counters.decode_steps <= 25
    assert engine.counters.sampled_tokens == 45


def test_a_groups_prompt_is_read_once(network: Network) -> None:
    """Eight samples of one prompt through three slots: later samples find the prompt's keys and values."""
    runner = make_runner(network, slots=3)
    read = []
    forward = runner._forward
    runner._forward = lambda tokens, positions, plan, rows: (  # type: ignore[method-assign]
        read.append(len(tokens)) if rows is not None else None,
        forward(tokens, positions, plan, rows),
    )[1]
    engine = make_engine(runner)
    run_requests(engine, [Request(PROMPT, Sampling(max_new_tokens=3 + seed), seed) for seed in range(8)])
    assert read == [len(PROMPT)]


def test_stop_tokens_end_a_request_and_are_reported(network: Network) -> None:
    free = alone(network, Request(PROMPT, Sampling(max_new_tokens=12), 4))
    assert not free.stopped
    third = int(free.tokens[2])
    cut = free.tokens.tolist()[: free.tokens.tolist().index(third) + 1]
    by_engine = alone(network, Request(PROMPT, Sampling(max_new_tokens=12), 4), stop_ids=(third,))
    by_request = alone(network, Request(PROMPT, Sampling(max_new_tokens=12, stop_token_ids=(third,)), 4))
    for found in (by_engine, by_request):
        assert found.stopped
        assert found.tokens.tolist() == cut


class Script(FixedSlots):
    """A runner whose model says a fixed text, one token after another, whatever it reads."""

    def __init__(self, tokens: list[int], slots: int = 1, length: int = 64) -> None:
        self.script, self.slots, self.length = tokens, slots, length
        self.prompt = 0

    def _logits(self, places: list[int]) -> torch.Tensor:
        logits = torch.full((len(places), 307), -1e4)
        for row, place in enumerate(places):
            logits[row, self.script[place]] = 0.0
        return logits

    def count_unread(self, prompt: Any) -> int:
        return len(prompt.tokens)

    def prefill(self, prompts: Any) -> torch.Tensor:
        self.prompt = len(prompts[0].tokens)
        return self._logits([0] * len(prompts))

    def decode(self, tokens: Any, positions: Any) -> torch.Tensor:
        return self._logits([position - self.prompt + 1 for position in positions])

    def move(self, *_: Any) -> None: ...

    def store_session(self, *_: Any) -> None: ...

    def read_columns(self, *_: Any) -> dict[Any, Any]:
        return {}

    def activate(self) -> None: ...

    def deactivate(self) -> None: ...


def scripted(tokenizer: Any, text: str, *stop: str) -> Any:
    """What is sampled when the model says ``text`` and the request stops at ``stop``."""
    ids = tokenizer(text)["input_ids"]
    request = Request(PROMPT, Sampling(max_new_tokens=len(ids), stop_strings=stop), 0)
    return run_requests(make_engine(Script(ids), tokenizer), [request])[0]


def test_a_stop_string_across_tokens_ends_the_request(tokenizer: Any) -> None:
    found = scripted(tokenizer, "one two</answer> three", "</answer>")
    assert found.stopped
    assert found.text == "one two</answer>"
    assert len(tokenizer("</answer>")["input_ids"]) > 2, "the stop string is several tokens"


def test_the_first_of_several_stop_strings_ends_the_request(tokenizer: Any) -> None:
    assert scripted(tokenizer, "a b c END d", "never", "END", " c").text == "a b c"


def test_a_text_that_only_resembles_a_stop_string_goes_on(tokenizer: Any) -> None:
    found = scripted(tokenizer, "</answe </answers", "</answer>")
    assert not found.stopped
    assert found.text == "</answe </answers"


def test_a_stop_string_in_the_prompt_does_not_count(tokenizer: Any) -> None:
    ids = tokenizer("go on")["input_ids"]
    request = Request(tokenizer("STOP")["input_ids"], Sampling(max_new_tokens=len(ids), stop_strings=("STOP",)), 0)
    assert not run_requests(make_engine(Script(ids), tokenizer), [request])[0].stopped


def test_a_stop_string_of_characters_of_many_tokens_is_found(tokenizer: Any) -> None:
    """Each of these characters is four byte tokens."""
    found = scripted(tokenizer, "done 🛑🛑🛑🛑 more", "🛑🛑🛑🛑")
    assert found.stopped
    assert found.text == "done 🛑🛑🛑🛑"


def test_max_new_tokens_bounds_the_answer(network: Network) -> None:
    for count in (1, 2, 9):
        found = alone(network, Request(PROMPT, Sampling(max_new_tokens=count), 4))
        assert len(found.tokens) == len(found.logprobs) == len(found.versions) == count
        assert not found.stopped


def test_an_answer_ends_where_the_sequence_is_full(network: Network) -> None:
    length = 16
    for prompt_length in (10, 15):
        engine = make_engine(make_runner(network, slots=2, length=length))
        found = run_requests(engine, [Request(list(range(4, 4 + prompt_length)), Sampling(max_new_tokens=500), 1)])
        assert len(found[0].tokens) == length - prompt_length


@pytest.mark.parametrize("prompt_length", [16, 17, 100])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_keys_to_change(network: Network, prompt_length: int) -> None:
    engine = make_engine(make_runner(network, slots=2, length=16))
    with pytest.raises(
        RequestTooLong, match=rf"{prompt_length} tokens leaves no room in a sequence of 16.*max_total_sequence_length"
    ):
        run_requests(engine, [Request([4] * prompt_length)])


def test_memory_that_holds_no_sequence_is_refused_with_the_keys_to_change(network: Network) -> None:
    needed = 48 * infer_cache_shape(network).bytes_per_token
    with pytest.raises(ValueError, match=r"torch_cfg\.kv_cache_memory_gb .* holds 47 tokens.*max_total_sequence_length = 48"):
        CachedRunner(network, cache_config(needed - 1, slots=4), length=48)
    assert CachedRunner(network, cache_config(needed, slots=4), length=48).slots == 1


def test_the_cache_and_its_prefixes_stay_within_the_configured_memory(network: Network) -> None:
    memory = 100 * infer_cache_shape(network).bytes_per_token
    runner = CachedRunner(network, cache_config(memory, slots=64, prepack_weights=False), length=40)
    assert runner.slots == 2
    run_requests(make_engine(runner), many_requests())
    used = sum(tensor.nbytes for tensor in (runner.cache.keys, runner.cache.values))
    used += sum(entry.keys.nbytes + entry.values.nbytes for entry in runner.prefixes._entries.values())
    assert used <= memory


def test_cancelling_a_request_frees_its_slot(network: Network) -> None:
    async def run() -> tuple[int, Any]:
        engine = make_engine(make_runner(network, slots=1))
        hog = asyncio.create_task(engine.generate(PROMPT, sampling=Sampling(max_new_tokens=40), seed=1))
        waiting = asyncio.create_task(engine.generate(PROMPT, sampling=Sampling(max_new_tokens=40), seed=2))
        last = asyncio.create_task(engine.generate(PROMPT, sampling=Sampling(max_new_tokens=6), seed=3))
        for _ in range(6):
            await asyncio.sleep(0)
        hog.cancel()
        waiting.cancel()
        found = await last
        await engine.close()
        return engine.counters.sampled_tokens, found

    sampled, found = asyncio.run(run())
    assert sampled < 20, "neither cancelled request ran on"
    assert found.tokens.tolist() == alone(network, Request(PROMPT, Sampling(max_new_tokens=6), 3)).tokens.tolist()


def test_requests_wait_while_the_engine_is_drained_and_get_the_new_version() -> None:
    network = Network(build("llama"))
    sampling = Sampling(max_new_tokens=6)

    async def run() -> tuple[Any, bool, Any]:
        engine = make_engine(make_runner(network, prepack=True))
        before = asyncio.create_task(engine.generate(PROMPT, sampling=sampling, seed=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.drain()
        assert before.done(), "draining waits for what is running"
        held = asyncio.create_task(engine.generate(PROMPT, sampling=sampling, seed=1))
        for _ in range(20):
            await asyncio.sleep(0)
        waited = not held.done()
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.mul_(1.5)
        engine.resume(7)
        after = await held
        await engine.close()
        return await before, waited, after

    before, waited, after = asyncio.run(run())
    assert waited
    assert set(before.versions.tolist()) == {0}
    assert set(after.versions.tolist()) == {7}
    assert before.tokens.tolist() != after.tokens.tolist(), "the weights are new"
    fresh = alone(network, Request(PROMPT, sampling, 1))
    assert after.tokens.tolist() == fresh.tokens.tolist(), "nothing of the old weights is left in a cache"
    assert torch.allclose(after.logprobs, fresh.logprobs, atol=1e-5)


def test_an_engine_waits_for_its_first_weights(network: Network) -> None:
    async def run() -> tuple[bool, Any]:
        engine = TorchEngine(make_runner(network), None, stop_ids=())
        engine.tokenizer = type("T", (), {"decode": lambda *_, **__: ""})()
        request = asyncio.create_task(engine.generate(PROMPT, sampling=Sampling(max_new_tokens=2), seed=1))
        for _ in range(10):
            await asyncio.sleep(0)
        waited = not request.done()
        engine.resume(3)
        found = await request
        await engine.close()
        return waited, found

    waited, found = asyncio.run(run())
    assert waited
    assert found.versions.tolist() == [3, 3]


def test_the_learner_gets_its_module_back_when_the_engine_is_drained() -> None:
    network = Network(build("llama"))
    names = {name: module.forward for name, module in network.model.named_modules()}

    async def run() -> None:
        engine = make_engine(make_runner(network, prepack=True))
        await generate_all(engine, [Request(PROMPT)])
        assert "forward" in vars(network.model.lm_head)
        await engine.drain()

    asyncio.run(run())
    assert {name: module.forward for name, module in network.model.named_modules()} == names


def test_a_session_that_goes_on_equals_reading_everything_again(network: Network, cache: str) -> None:
    """Three turns with observations between them; the second reads only what is new."""

    async def conversation(session: str, runner: CachedRunner, disturb: bool) -> tuple[list[list[int]], list[int]]:
        read: list[int] = []
        forward = runner._forward

        def counted(tokens: Any, positions: Any, plan: Any, rows: Any) -> Any:
            read.extend([len(tokens)] if rows is not None else [])
            return forward(tokens, positions, plan, rows)

        runner._forward = counted  # type: ignore[method-assign]
        engine = make_engine(runner)
        so_far, turns = list(PROMPT), []
        for turn in range(3):
            asked = [engine.generate(so_far, sampling=Sampling(max_new_tokens=5), seed=turn, session=session)]
            if disturb:
                asked += [engine.generate([9, turn + 4], sampling=Sampling(max_new_tokens=3), seed=50 + turn)]
            found, *_ = await asyncio.gather(*asked)
            turns.append(found.tokens.tolist())
            so_far += [*turns[-1], 60 + turn, 61]
        await engine.close()
        return turns, read

    wanted, read_all = asyncio.run(conversation("", make_runner(network, prefix_tokens=0), False))
    assert read_all == ([5, 12, 19] if cache == "slots" else [5, 7, 7]), "pages are found by their tokens too"
    found, read_new = asyncio.run(conversation("a", make_runner(network), False))
    assert found == wanted
    assert read_new == [5, 3, 3], "the last sampled token and the two observed ones"
    assert asyncio.run(conversation("a", make_runner(network), True))[0] == wanted


def test_two_sessions_do_not_mix(network: Network) -> None:
    """A session's name is no promise: what it was through must be a prefix of the new prompt."""

    async def run(session: str) -> Any:
        engine = make_engine(make_runner(network))
        await engine.generate([50, 51, 52], sampling=Sampling(max_new_tokens=4), seed=1, session=session)
        found = await engine.generate(PROMPT, sampling=Sampling(max_new_tokens=6), seed=2, session=session)
        await engine.close()
        return found.tokens.tolist()

    assert asyncio.run(run("same")) == asyncio.run(run(""))


def test_a_session_may_ask_for_the_same_prompt_again(network: Network) -> None:
    """With so little memory for prefixes that only the session's own is left, which has no logits."""

    async def run() -> Any:
        engine = make_engine(make_runner(network, prefix_tokens=len(PROMPT)))
        sampling = Sampling(max_new_tokens=1)
        first = await asyncio.wait_for(engine.generate(PROMPT, sampling=sampling, seed=1, session="s"), 5)
        again = await asyncio.wait_for(engine.generate(PROMPT, sampling=sampling, seed=1, session="s"), 5)
        await engine.close()
        return first.tokens.tolist(), again.tokens.tolist()

    first, again = asyncio.run(run())
    assert first == again


@pytest.mark.parametrize("runner", ["cached", "recompute"])
def test_a_request_that_cannot_be_read_fails_alone(network: Network, runner: str) -> None:
    """Law 7: an empty prompt is an error of its own request, not of the engine."""

    async def run() -> Any:
        made = make_runner(network) if runner == "cached" else RecomputeRunner(network, max_slots=2, length=48)
        engine = make_engine(made)
        with pytest.raises(ValueError, match="prompt"):
            await asyncio.wait_for(engine.generate([], sampling=Sampling(max_new_tokens=2), seed=1), 5)
        found = await engine.generate(PROMPT, sampling=Sampling(max_new_tokens=2), seed=1)
        await engine.close()
        return found

    assert len(asyncio.run(run()).tokens) == 2


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_failure_of_the_model_reaches_everyone_who_waits(network: Network, phase: str) -> None:
    async def run() -> None:
        runner = make_runner(network, slots=1)

        def broken(*_: Any) -> Any:
            raise RuntimeError("the device is gone")

        setattr(runner, phase, broken)
        engine = make_engine(runner)
        asked = (engine.generate(PROMPT, sampling=Sampling(max_new_tokens=4), seed=seed) for seed in range(3))
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
        assert [str(error) for error in found] == ["the device is gone"] * 3
        with pytest.raises(RuntimeError, match="the embedded engine has stopped"):
            await engine.generate(PROMPT, sampling=Sampling(), seed=9)
        await asyncio.wait_for(engine.drain(), 5)
        await engine.close()

    asyncio.run(run())


def test_closing_the_engine_answers_everyone_who_waits(network: Network) -> None:
    """A hang without a word is the worst way to end: a pending request gets an exception."""

    async def run() -> list[Any]:
        engine = make_engine(make_runner(network, slots=1))
        pending = [
            asyncio.create_task(engine.generate(PROMPT, sampling=Sampling(max_new_tokens=40), seed=seed)) for seed in range(2)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.close()
        done, waiting = await asyncio.wait(pending, timeout=1)
        for task in waiting:
            task.cancel()
        assert not waiting, "closed, and nobody told the callers"
        return [task.exception() if not task.cancelled() else asyncio.CancelledError() for task in done]

    assert all(error is not None for error in asyncio.run(run()))


def test_without_a_size_the_cache_is_a_tenth_of_a_gpu_and_on_a_cpu_two_gigabytes() -> None:
    config = TorchGenerationConfig()
    assert [config.cache_memory_gb(memory) for memory in (None, 8.0, 80.0)] == [2.0, 2.0, 8.0]
    assert TorchGenerationConfig(kv_cache_memory_gb=0.5).cache_memory_gb(80.0) == 0.5
