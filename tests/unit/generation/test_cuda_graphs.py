"""CUDA graphs of decoding steps: a device that captures and replays stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.generation.torch.cuda_graphs import WARM_UPS, DecodeGraphs, capture_obstacle
from strop.generation.torch.model_runner import CachedRunner
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed
from support.models import FAMILIES, build
from support.torch_engine import Request, make_engine, make_runner, run_requests, token_lists

CPU = torch.device("cpu")


class Graph:
    def replay(self) -> None:
        self.logits.copy_(self.step(*self.inputs))

    def record(self, step: Any, inputs: tuple[Tensor, Tensor], logits: Tensor) -> None:
        self.step, self.inputs, self.logits = step, inputs, logits


class Device:
    """What ``torch.cuda`` is to graphs. A capture computes nothing: what the step changed meanwhile is put back."""

    def __init__(self, changes: tuple[Tensor, ...] = (), fails_at: int = 0) -> None:
        self.changes = changes
        self.fails_at = fails_at  # the size whose capture fails
        self.captures: list[dict[str, Any]] = []
        self.steps: list[tuple[list[int], list[int]]] = []  # that were computed
        self.now = "the stream of the engine"
        self.capturing: Graph | None = None

    CUDAGraph = Graph

    def Stream(self, device: Any) -> Any:
        return SideStream()

    def graph_pool_handle(self) -> Any:
        return object()

    def current_stream(self, device: Any = None) -> Any:
        return self.now if isinstance(self.now, SideStream) else SideStream()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph: Graph, **options: Any) -> Iterator[None]:
        kept = [tensor.clone() for tensor in self.changes]
        self.captures.append(options)
        before, self.now, self.capturing = self.now, "the stream of a capture", graph
        yield  # after an error neither this stream nor that of the caller comes back, as where CUDA refuses to end a capture
        self.now, self.capturing = before, None
        for tensor, old in zip(self.changes, kept, strict=True):
            tensor.copy_(old)

    def watch(self, step: Any) -> Any:
        """Return the step as it is computed or captured here."""

        def watched(tokens: Tensor, positions: Tensor) -> Tensor:
            if self.capturing is None:
                self.steps.append((tokens.tolist(), positions.tolist()))
                return step(tokens, positions)
            if len(tokens) == self.fails_at:
                raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nand more")
            logits = step(tokens, positions)
            self.capturing.record(step, (tokens, positions), logits)
            return logits

        return watched


class SideStream:
    def wait_stream(self, stream: Any) -> None: ...


def add(tokens: Tensor, positions: Tensor) -> Tensor:
    return (tokens + 100 * positions)[:, None].clone()


def make_graphs(step: Any, slots: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return DecodeGraphs(device.watch(step), slots, CPU)


def test_a_graph_is_warmed_up_on_the_very_step_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    graphs = make_graphs(add, 6, device, monkeypatch)
    for tokens, positions in (
        ([7, 8, 9], [3, 4, 5]),
        ([4], [2]),
        ([1, 2, 3, 4, 5], [9, 9, 9, 9, 9]),
        ([6, 5, 4, 3], [1, 1, 1, 1]),
    ):
        found = graphs(tokens, positions)
        assert found is not None
        assert found.flatten().tolist() == [token + 100 * position for token, position in zip(tokens, positions, strict=True)]
    warm_ups = [([7, 8, 9, 0], [3, 4, 5, 0]), ([4], [2]), ([1, 2, 3, 4, 5, 0], [9, 9, 9, 9, 9, 0])]
    assert device.steps == [step for step in warm_ups for _ in range(WARM_UPS)]
    assert len({(id(each["pool"]), id(each["stream"])) for each in device.captures}) == 1, "one pool, one stream"
    assert {each["capture_error_mode"] for each in device.captures} == {"thread_local"}


def requests(count: int = 12) -> list[Request]:
    options = [Sampling(), Sampling(temperature=0.7, top_k=40), Sampling(top_p=0.9), Sampling(temperature=0.0)]
    return [
        Request(
            [(7 * (place % 4) + 3 * step) % 300 + 4 for step in range(1 + 4 * (place % 4))],
            replace(options[place % len(options)], max_new_tokens=1 + 5 * place % 19),
            mix_seed(3, place),
        )
        for place in range(count)
    ]


def run_with_graphs(network: Network, device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[CachedRunner, Any]:
    runner = make_runner(network, slots=5)
    device.changes = (runner.cache.keys, runner.cache.values)
    runner.graphs = make_graphs(runner._decode_static, runner.slots, device, monkeypatch)
    return runner, run_requests(make_engine(runner), requests())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_completions_are_those_without_graphs_at_sizes_that_change_among_running_requests(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, device = Network(build(family)), Device()
    plain = run_requests(make_engine(make_runner(network, slots=5)), requests())
    _, found = run_with_graphs(network, device, monkeypatch)
    assert len(device.captures) == 4, "sizes 5, 4, 2 and 1"
    assert token_lists(found) == token_lists(plain)
    for left, right in zip(found, plain, strict=True):
        assert torch.allclose(left.logprobs, right.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_capture_that_fails_leaves_its_stream_and_decoding_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, device = Network(build("llama")), Device(fails_at=2)
    plain = run_requests(make_engine(make_runner(network, slots=5)), requests())
    runner, found = run_with_graphs(network, device, monkeypatch)
    assert device.now == "the stream of the engine"
    assert runner.graphs is None and token_lists(found) == token_lists(plain)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "a step of 2 sequences cannot be captured (Cannot copy between CPU and CUDA tensors" in said[0]


@pytest.mark.slow
def test_mixtures_of_experts_are_not_captured_unless_their_products_have_one_shape() -> None:
    mixtures = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "glm4_moe")
    for family in dict.fromkeys((*FAMILIES, *mixtures)):
        model = build(family)
        assert (capture_obstacle(model) is not None) == (family in mixtures), family
        if family in mixtures:
            model.set_experts_implementation("batched_mm")
            assert capture_obstacle(model) is None, family
