"""Publishing with engines that are plain objects of this process: what is proven when, and what happens where something fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from loop.fakes import FakeGenerator
from strop.generation.quantized_rollouts import PlannedPrecision
from strop.models.chat_template import ChatTemplate
from strop.models.quantization.number_format import FP8_BLOCK, MXFP8, NVFP4, round_trip
from strop.models.quantization.quantization_plan import make_plan, unpack
from strop.sampling import Sampling
from strop.types import Batch
from strop.weight_sync.base import (
    AdapterFiles,
    CanarySample,
    ChannelAddress,
    EngineDied,
    EngineLost,
    LoadReceipt,
    Manifest,
    Receiver,
    Sender,
    TensorFingerprint,
    TransportError,
    UpdatableEngine,
)
from strop.weight_sync.exporter import BlockingExporter, make_local_exporter
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros
from strop.weight_sync.in_process import InProcessWeights, TimedMemory
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.manifest import build_manifest
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.verification import CANARY_TOKENS, Canary, VerificationFailed, make_canary, verify_fingerprints
from strop.weight_sync.weight_source import local_weights
from strop.weight_sync.weight_sync_config import WeightSyncConfig

ALWAYS = WeightSyncConfig(proof="always")

Publisher = Callable[..., WeightPublisher]


class PlainEngine:
    """Holds tensors; goes wrong where it is told to."""

    receivers = 1

    def __init__(self, name: str = "engine 0") -> None:
        self.name = name
        self.alive = False
        self.tensors: dict[str, Tensor] = {}
        self.label = -1
        self.open = False
        self.calls: list[str] = []
        self.spoils: Callable[[dict[str, Tensor]], None] = lambda tensors: None
        self.says: Callable[[int], int] = lambda version: version
        self.dies_in: list[str] = []
        self._receiver: Receiver | None = None

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.dies_in:
            self.dies_in.remove(call)
            self.alive = False
        if not self.alive:
            raise EngineDied(f"{self.name} died in {call}")

    async def start(self) -> None:
        self.alive, self.tensors, self.label = True, {}, -1
        self._enter("start")

    async def close(self) -> None:
        self.alive = False

    async def connect(self, address: ChannelAddress, first: int) -> None:
        self._enter("connect")
        self._receiver = address.connect(first, torch.device("cpu"))

    async def pause(self, *, keep_running: bool) -> None:
        self._enter("pause")
        self.open = False

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        self._enter("load")
        receiver = self._receiver
        assert receiver is not None
        self.label = -1
        arrived = await asyncio.to_thread(lambda: {name: tensor.clone() for name, tensor in receiver.receive(manifest)})
        marks = {name: (fingerprint(tensor),) for name, tensor in arrived.items()}
        self.spoils(arrived)
        self.tensors, self.label = arrived, self.says(version)
        return LoadReceipt(version=self.label, fingerprints=marks, seconds=0.0)

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        raise NotImplementedError

    async def read_back_fingerprints(self) -> Mapping[str, tuple[TensorFingerprint, ...]]:
        self._enter("held")
        return {
            name: (TensorFingerprint(fingerprint(tensor + 0.0), (0, len(tensor), 0, tensor[0].numel())),)
            for name, tensor in self.tensors.items()
        }

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        self._enter("ask")
        return CanarySample(tokens=torch.tensor([1]), logprobs=torch.tensor([float(self.tensors["a"].sum())]), cached=0)

    async def reset_prefix_cache(self, *, running: bool) -> None:
        self._enter("forget")

    async def resume(self, version: int) -> None:
        self._enter("resume")
        assert self.label == version
        self.open = True

    async def sleep(self) -> None:
        self._enter("sleep")

    async def wake(self) -> None:
        self._enter("wake")


class Learner:
    def __init__(self) -> None:
        self.a, self.b = torch.ones(3, 4), torch.full((3, 4), 2.0)

    def weights(self) -> list[tuple[str, Tensor]]:
        return [("a", self.a), ("b", self.b), ("tied to a", self.a)]

    def train(self) -> None:
        self.a += 1
        self.b *= 2

    async def score(self, prompts: Sequence[Sequence[int]], answers: Sequence[CanarySample]) -> list[Tensor]:
        return [torch.tensor([float(self.a.sum())]) for _ in answers]


def senders(folder: Path) -> dict[str, Callable[[int], Sender]]:
    return {"folder": lambda count: FolderSender(folder, count), "memory": MemorySender, "broadcast": BroadcastSender}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """Make publishers, which are closed after the test."""
    made: list[WeightPublisher] = []

    def make(
        engines: Sequence[PlainEngine],
        learner: Learner | None = None,
        *,
        transport: str = "folder",
        config: WeightSyncConfig = ALWAYS,
        **options: bool,
    ) -> WeightPublisher:
        learner = learner or Learner()
        canary = Canary(prompts=((1, 2),), sampling=Sampling(), score=learner.score, tolerance=0.01)
        settings = PublishOptions(**{"separate_devices": True, **options})
        exporter = make_local_exporter(
            learner.weights, senders(tmp_path)[transport], dtype=torch.float32, keep_snapshot=settings.async_training
        )
        made.append(WeightPublisher(exporter, engines, config, settings, canary=canary))
        return made[-1]

    yield make
    for each in made:
        asyncio.run(each.close())


def test_after_a_publish_every_engine_holds_each_tensor_once_and_goes_on(publisher: Publisher) -> None:
    learner, engines = Learner(), [PlainEngine("engine 0"), PlainEngine("engine 1")]
    weights = publisher(engines, learner)
    for version in range(3):
        said = asyncio.run(weights.publish(version))
        learner_now = dict(learner.weights())
        for engine in engines:
            assert engine.open and engine.label == version
            assert set(engine.tensors) == {"a", "b"}, "what is tied is sent once"
            assert all(torch.equal(tensor, learner_now[name]) for name, tensor in engine.tensors.items())
        assert said["weights/tensors_read_back"].value == 2
        learner.train()


@pytest.mark.parametrize(
    ("mode", "asked"),
    [("always", [0, 1, 2, 3, 4, 5]), ("first", [0]), ("every_n", [0, 2, 4])],
    ids=["always", "first", "every_n"],
)
def test_the_costly_questions_are_asked_when_they_are_due(
    publisher: Publisher, mode: Literal["always", "first", "every_n"], asked: list[int]
) -> None:
    engine = PlainEngine()
    weights = publisher([engine], config=WeightSyncConfig(proof=mode, proof_every=2))
    found = []
    for version in range(6):
        engine.calls.clear()
        asyncio.run(weights.publish(version))
        if "held" in engine.calls and "ask" in engine.calls:
            found.append(version)
    assert found == asked


def _drop(tensors: dict[str, Tensor]) -> None:
    tensors["b"] = torch.zeros_like(tensors["b"])


def _swap(tensors: dict[str, Tensor]) -> None:
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]


@pytest.mark.parametrize(("fault", "named"), [(_drop, "the b that was sent"), (_swap, "it has the values of")])
def test_an_engine_that_computes_with_something_else_is_found_out_and_takes_no_requests(
    publisher: Publisher, fault: Callable[[dict[str, Tensor]], None], named: str
) -> None:
    engine = PlainEngine()
    engine.spoils = fault
    weights = publisher([engine])
    with pytest.raises(VerificationFailed, match=named):
        asyncio.run(weights.publish(0))
    assert not engine.open and weights.version == -1


def test_an_engine_that_echoes_another_version_is_found_out_even_when_nothing_else_is_asked(publisher: Publisher) -> None:
    engine = PlainEngine()
    weights = publisher([engine], config=WeightSyncConfig(proof="first"))
    asyncio.run(weights.publish(0))
    engine.says = lambda version: version - 1
    with pytest.raises(VerificationFailed, match="version 1, but reports that it holds version 0"):
        asyncio.run(weights.publish(1))


@pytest.mark.parametrize("call", ["pause", "connect", "load", "held", "ask", "resume"])
def test_an_engine_that_dies_anywhere_in_a_publish_is_started_anew_and_the_publish_ends(publisher: Publisher, call: str) -> None:
    learner, engines = Learner(), [PlainEngine("engine 0"), PlainEngine("engine 1")]
    weights = publisher(engines, learner)
    asyncio.run(weights.publish(0))
    learner.train()
    engines[1].dies_in = [call] if call != "connect" else ["pause", "connect"]
    asyncio.run(asyncio.wait_for(weights.publish(1), 60))
    assert all(engine.open and torch.equal(engine.tensors["b"], learner.b) for engine in engines)


@pytest.mark.parametrize("call", ["connect", "load"])
@pytest.mark.parametrize("transport", ["folder", "memory", "broadcast"])
def test_nobody_waits_for_an_engine_that_died_before_it_took_anything(publisher: Publisher, transport: str, call: str) -> None:
    learner, engines = Learner(), [PlainEngine("engine 0"), PlainEngine("engine 1")]
    weights = publisher(engines, learner, transport=transport)
    engines[1].dies_in = [call]
    started = time.monotonic()
    asyncio.run(asyncio.wait_for(weights.publish(0), 60))
    assert time.monotonic() - started < 15, "time limits of the transport are minutes"
    assert all(engine.open and torch.equal(engine.tensors["b"], learner.b) for engine in engines)


@pytest.mark.parametrize("transport", ["folder", "memory", "broadcast"])
def test_a_sender_that_is_closed_by_another_thread_ends_its_publish(tmp_path: Path, transport: str) -> None:
    sender = senders(tmp_path)[transport](1)
    receiver = sender.address.connect(0, torch.device("cpu"))  # and reads nothing
    tensors = Learner().weights()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, build_manifest(tensors, torch.float32), tensors)
        time.sleep(0.3)
        sender.close()
        with pytest.raises(TransportError, match="closed"):
            sending.result(10)
    receiver.close()


def test_an_engine_that_dies_every_time_ends_the_run(publisher: Publisher) -> None:
    engine = PlainEngine()
    weights = publisher([engine])
    engine.dies_in = ["load"] * 10
    with pytest.raises(EngineDied):
        asyncio.run(weights.publish(0))


@pytest.mark.parametrize("async_training", [True, False])
def test_an_engine_that_is_revived_gets_the_weights_of_the_last_publish_wherever_the_learner_is_by_then(
    publisher: Publisher, async_training: bool
) -> None:
    learner, engine = Learner(), PlainEngine()
    weights = publisher([engine], learner, async_training=async_training)
    asyncio.run(weights.publish(5))
    published = learner.b.clone()
    if async_training:
        learner.train()
    engine.alive = False
    asyncio.run(weights.restart_engine(engine))
    assert engine.open and engine.label == 5 and torch.equal(engine.tensors["b"], published)


def test_a_revived_engine_that_fails_its_proof_is_closed_and_the_next_publish_says_so(publisher: Publisher) -> None:
    engine = PlainEngine()
    weights = publisher([engine])
    asyncio.run(weights.publish(0))
    engine.alive, engine.spoils = False, _swap
    with pytest.raises(VerificationFailed):
        asyncio.run(weights.restart_engine(engine))
    assert not engine.alive
    with pytest.raises(VerificationFailed):
        asyncio.run(weights.publish(1))


def test_engines_beside_the_learner_sleep_while_it_works_and_wake_before_they_are_sent_weights(publisher: Publisher) -> None:
    engine = PlainEngine()
    weights = publisher([engine], separate_devices=False)
    asyncio.run(weights.publish(0))
    engine.calls.clear()
    asyncio.run(weights.yield_device())
    asyncio.run(weights.publish(1))
    assert [call for call in engine.calls if call in ("pause", "sleep", "wake", "load", "resume")] == [
        "pause", "sleep", "pause", "wake", "load", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_an_engine_that_dies_while_it_gives_up_the_device_is_started_by_the_next_publish(publisher: Publisher, call: str) -> None:
    engines = [PlainEngine("engine 0"), PlainEngine("engine 1")]
    weights = publisher(engines, separate_devices=False)
    asyncio.run(weights.publish(0))
    engines[0].dies_in = [call]
    asyncio.run(weights.yield_device())
    assert "sleep" in engines[1].calls and not engines[0].alive
    asyncio.run(weights.publish(1))
    assert all(engine.alive and engine.open and engine.label == 1 for engine in engines)


def test_an_engine_that_dies_as_it_wakes_leaves_no_other_asleep(publisher: Publisher) -> None:
    engines = [PlainEngine("engine 0"), PlainEngine("engine 1")]
    weights = publisher(engines, separate_devices=False)
    asyncio.run(weights.publish(0))
    asyncio.run(weights.yield_device())
    engines[0].dies_in = ["wake"]
    engines[1].calls.clear()
    asyncio.run(weights.publish(1))
    assert engines[1].calls.index("wake") < engines[1].calls.index("load")


class SlowEngine(PlainEngine):
    """Takes its time to start, to sleep and to wake, and notes when it is done."""

    async def _slow(self, call: str) -> None:
        await asyncio.sleep(0.2)
        self._enter(call)

    async def start(self) -> None:
        await asyncio.sleep(0.2)
        await super().start()

    async def sleep(self) -> None:
        await self._slow("sleep")

    async def wake(self) -> None:
        await self._slow("wake")


def test_eight_engines_start_sleep_and_wake_in_the_time_of_one(publisher: Publisher) -> None:
    engines = [SlowEngine(f"engine {number}") for number in range(8)]
    weights = publisher(engines, separate_devices=False, config=WeightSyncConfig(proof="first"))

    async def cycle() -> tuple[float, float]:
        started = time.monotonic()
        await weights.publish(0)
        published = time.monotonic()
        await weights.yield_device()
        return published - started, time.monotonic() - published

    for seconds in (*asyncio.run(cycle()), asyncio.run(_timed(weights.publish(1)))):
        assert 0.2 <= seconds < 0.8, "one after another takes 1.6 s"


async def _timed(call: Awaitable[object]) -> float:
    started = time.monotonic()
    await call
    return time.monotonic() - started


def test_a_learner_comes_back_only_when_the_last_engine_sleeps_or_is_dead(publisher: Publisher) -> None:
    engines: list[PlainEngine] = [PlainEngine("engine 0"), PlainEngine("engine 1"), SlowEngine("engine 2")]
    calls: list[str] = []
    for engine in engines:
        engine.calls = calls
    weights = publisher(engines, separate_devices=False)
    weights.learner_memory = TimedMemory(Memory(calls))
    asyncio.run(weights.publish(0))
    engines[0].dies_in = ["sleep"]
    calls.clear()
    asyncio.run(weights.yield_device())
    assert calls.count("sleep") == 3 and calls[-1] == "onload"
    calls.clear()
    asyncio.run(weights.publish(1))
    assert calls[0] == "offload" and calls.count("start") == 1, "and the dead one is started again"
    assert all(engine.open and engine.label == 1 for engine in engines)


@pytest.mark.parametrize(("call", "error"), [("sleep", RuntimeError), ("wake", RuntimeError), ("start", ValueError)])
def test_an_error_that_no_restart_mends_ends_the_run_when_no_other_engine_is_in_the_middle_of_it(
    publisher: Publisher, call: str, error: type[Exception]
) -> None:
    engines = [PlainEngine("engine 0"), SlowEngine("engine 1"), SlowEngine("engine 2")]
    weights = publisher(engines, separate_devices=False)

    async def refuse() -> None:
        raise error("no kernel for this model")

    async def cycle() -> None:
        for version in range(2):
            await weights.publish(version)
            await weights.yield_device()

    setattr(engines[0], call, refuse)
    engines[2].dies_in = [call] if call != "start" else []
    with pytest.raises(error, match="no kernel"):
        asyncio.run(cycle())
    assert engines[1].calls[-1] == call and call in engines[2].calls


def test_engines_that_are_lost_as_they_start_are_dropped_and_the_others_go_on(publisher: Publisher) -> None:
    engines = [PlainEngine(f"engine {number}") for number in range(4)]
    weights = publisher(engines)
    dropped: list[UpdatableEngine] = []

    async def lost() -> None:
        raise EngineLost("its node is gone")

    def drop(engine: UpdatableEngine) -> bool:
        dropped.append(engine)
        return True

    weights._drop_engine = drop
    engines[0].start = engines[2].start = lost  # type: ignore[method-assign]
    asyncio.run(weights.publish(0))
    assert dropped == [engines[0], engines[2]] and weights.engines == (engines[1], engines[3])
    assert engines[1].open and engines[3].open


def test_processes_that_should_hold_the_same_and_do_not_are_found_out() -> None:
    held = {"a": (TensorFingerprint(1, (0, 2, 0, 2)), TensorFingerprint(3, (0, 2, 0, 2)))}
    with pytest.raises(VerificationFailed, match="its processes differ"):
        verify_fingerprints("engine 0", {"a": 1}, {}, held)
    shards = {"a": (TensorFingerprint(1, (0, 1, 0, 2)), TensorFingerprint(3, (1, 1, 0, 2)), TensorFingerprint(3, (1, 1, 0, 2)))}
    assert verify_fingerprints("engine 0", {"a": 4, "b": 9}, {}, shards).unread == ("b",)


class Memory:
    """The learner's memory, which notes where the learner is in the calls of an engine."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def offload(self) -> None:
        self.calls.append("offload")

    async def onload(self) -> None:
        self.calls.append("onload")


def test_a_learner_leaves_before_engines_start_or_wake_and_comes_back_after_they_sleep(publisher: Publisher) -> None:
    engine = PlainEngine()
    weights = publisher([engine], config=WeightSyncConfig(proof="first"), separate_devices=False)
    weights.learner_memory = TimedMemory(Memory(engine.calls))

    async def train_twice() -> list[float]:
        seconds = []
        for version in range(2):
            seconds.append((await weights.publish(version))["timing/train/offload"].value)
            await weights.yield_device()
        return seconds

    assert all(second >= 0 for second in asyncio.run(train_twice()))
    first, second = engine.calls[: engine.calls.index("onload") + 1], engine.calls[engine.calls.index("onload") + 1 :]
    assert first[:2] == ["offload", "start"] and first[-2:] == ["sleep", "onload"]
    assert second[0] == "offload" and second.index("wake") < second.index("load") and second[-2:] == ["sleep", "onload"]


async def tokens_as_logprobs(batch: Batch) -> Tensor:
    return batch.target.double()


def canary(
    tokenizer: Any, *, config: WeightSyncConfig | None = None, precision: str = "float32", max_length: int = 512
) -> Canary:
    asked = Sampling(temperature=0.7, top_k=5, record_sampling_mask=True, max_new_tokens=300, stop_strings=("x",), entropy=True)
    return make_canary(
        ChatTemplate(tokenizer),
        config or WeightSyncConfig(),
        asked,
        tokens_as_logprobs,
        precision=precision,
        max_length=max_length,
        share_prefixes=True,
        seed=3,
    )


def test_it_samples_as_the_run_does_but_a_few_tokens_that_nothing_stops(tokenizer: Any) -> None:
    expected = Sampling(temperature=0.7, top_k=5, record_sampling_mask=True, max_new_tokens=CANARY_TOKENS)
    assert canary(tokenizer).sampling == expected and canary(tokenizer).seed == 3


def test_its_prompts_leave_room_in_the_engines_longest_sequence(tokenizer: Any) -> None:
    assert all(len(prompt) > 32 for prompt in canary(tokenizer).prompts), "they fill blocks of a prefix cache"
    assert [len(prompt) for prompt in canary(tokenizer, max_length=CANARY_TOKENS + 7).prompts] == [7, 7]
    assert [len(prompt) for prompt in canary(tokenizer, max_length=4).prompts] == [1, 1]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.002), ("bfloat16", 0.1)])
def test_the_tolerance_is_the_precision_s_unless_it_is_set(tokenizer: Any, precision: str, tolerance: float) -> None:
    assert canary(tokenizer, precision=precision).tolerance == tolerance
    assert canary(tokenizer, precision=precision, config=WeightSyncConfig(canary_tolerance=0.3)).tolerance == 0.3


def test_the_learner_scores_each_sample_after_its_prompt(tokenizer: Any) -> None:
    checked = canary(tokenizer)
    tokens = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    samples = [CanarySample(tokens=each, logprobs=torch.zeros(len(each)), cached=0) for each in tokens]
    scores = asyncio.run(_score(checked, samples))
    assert [score.tolist() for score in scores] == [[5.0, 6.0, 7.0], [8.0, 9.0]]
    assert all(score.dtype == torch.float32 for score in scores)


async def _score(checked: Canary, samples: list[CanarySample]) -> list[Tensor]:
    return list(await checked.score(checked.prompts, samples))


@dataclass
class Caching:
    """An engine that finds so many tokens of each prompt in its prefix cache."""

    cached: list[int]
    name: str = "engine 0"

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        return CanarySample(tokens=torch.tensor([5]), logprobs=torch.full((1,), 5.0), cached=self.cached.pop(0))


@pytest.mark.parametrize(("cached", "refused"), [((0, 0), False), ((0, 3), False), ((0, 4), True), ((1, 0), True)])
def test_what_all_prompts_begin_with_may_be_cached_after_the_first(
    cached: tuple[int, int], refused: bool, tokenizer: Any
) -> None:
    checked = replace(canary(tokenizer), prompts=((1, 2, 3, 4, 5), (1, 2, 3, 9, 9)))
    with pytest.raises(VerificationFailed, match="prefix cache") if refused else nullcontext():
        asyncio.run(checked.check(Caching(list(cached))))  # type: ignore[arg-type]


def test_every_generator_is_drained_and_resumed_with_the_new_version():
    generators = [FakeGenerator(None), FakeGenerator(None)]
    weights = InProcessWeights(generators)

    async def step():
        await weights.yield_device()
        before = [list(generator.events) for generator in generators]
        return before, await weights.publish(4)

    before, found = asyncio.run(step())
    assert before == [["drain"], ["drain"]]
    assert [(generator.version, generator.events) for generator in generators] == [(4, ["drain", "resume 4"])] * 2
    assert found["weights/publish_seconds"].value >= 0


NAME, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"


class KeepingSender:
    """Keeps copies of what it is given."""

    receivers = 1
    address: Any = None

    def __init__(self, receivers: int) -> None:
        self.sent: dict[str, torch.Tensor] = {}

    def send(self, manifest: Manifest, tensors: Any) -> None:
        self.sent = {name: tensor.clone() for name, tensor in tensors}
        entries = [(entry.name, entry.dtype, entry.shape) for entry in manifest.entries]
        assert entries == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.sent.items()]

    def close(self) -> None: ...


def export(
    precision: PlannedPrecision | None, *, keep: bool = False
) -> tuple[dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]:
    """Send two tensors; return them as they are, the fingerprints, and what was sent."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(40, 70, generator=generator) for name in (NAME, HEAD)}
    sender = KeepingSender(1)
    exporter = BlockingExporter(
        lambda: local_weights(weights.items()),
        lambda receivers: sender,  # type: ignore[arg-type, return-value]
        dtype=torch.bfloat16,
        keep_snapshot=keep,
        quantization=precision,
    )
    plan = exporter.prepare("weights")
    assert {entry.name for entry in plan.manifest.entries} == {NAME, HEAD}
    exporter.open(1)
    fingerprints = exporter.send(read_back=True)
    return weights, fingerprints, sender.sent


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number_format", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda each: each.name)
def test_engines_are_sent_rounded_weights(number_format: Any, keep: bool) -> None:
    precision = PlannedPrecision(make_plan(number_format), torch.bfloat16, by_engine=False)
    weights, fingerprints, sent = export(precision, keep=keep)
    assert torch.equal(sent[NAME], round_trip(weights[NAME].bfloat16(), number_format))
    assert torch.equal(sent[HEAD], weights[HEAD].bfloat16())
    assert fingerprints.sent == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert fingerprints.read_back == {name: fingerprint(normalize_zeros(tensor)) for name, tensor in sent.items()}


def test_an_engine_that_rounds_itself_is_sent_the_weights_and_compared_with_the_rounded_ones() -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True)
    weights, fingerprints, sent = export(precision)
    assert torch.equal(sent[NAME], weights[NAME].bfloat16())
    assert fingerprints.sent[NAME] == fingerprint(sent[NAME])
    held = round_trip(weights[NAME].bfloat16(), FP8_BLOCK)
    assert fingerprints.read_back[NAME] == fingerprint(normalize_zeros(held)) != fingerprint(normalize_zeros(sent[NAME]))


def test_weights_are_cast_to_the_precision_of_the_engine_before_they_are_rounded() -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=False)
    weight = torch.randn(30, 30, generator=torch.Generator().manual_seed(1))
    rounded = precision.round(weight)
    assert rounded.dtype == torch.float32 and torch.equal(rounded, round_trip(weight.bfloat16(), FP8_BLOCK).float())


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_may_be_sent_values_and_scales_and_is_compared_with_what_they_stand_for(keep: bool) -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True, packs=True)
    weights, fingerprints, sent = export(precision, keep=keep)
    assert sent[NAME].dtype is torch.uint8 and torch.equal(sent[HEAD], weights[HEAD].bfloat16())
    assert fingerprints.sent == {name: fingerprint(tensor) for name, tensor in sent.items()}
    held = round_trip(weights[NAME].bfloat16(), FP8_BLOCK)
    assert torch.equal(unpack(sent[NAME], FP8_BLOCK).dequantize(torch.bfloat16), held)
    assert fingerprints.read_back[NAME] == fingerprint(normalize_zeros(held))
