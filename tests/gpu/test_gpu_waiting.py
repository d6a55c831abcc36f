"""What makes a host wait for a GPU, and what it sends there, counted on the simulated GPU: bounds, so that none comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from strop.data.packing_config import GPU_TOKENS
from strop.extensions.recorded.supervised import SFT
from strop.generation.base import Completion
from strop.gpus import KIND
from strop.learner.torch.scorer import NetworkScorer
from strop.models.attention import flash_libraries
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from strop.weight_sync.fingerprints import fingerprint
from support import simulated_device
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import build
from support.rollouts import make_group, make_rollout, make_turn, pack_for, pack_grpo, simple_groups
from support.sweep import sweep_rows
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND != "sim", reason="counted on the simulated GPU (pytest --simulated-gpu)")]

SHAPES = ((11, (9, 1, 14)), (2, (5,)), (5, (20, 3)))


def crossings(counts: dict[str, int]) -> tuple[int, ...]:
    """Values that the host reads, copies down, copies up from pageable and from pinned memory."""
    return tuple(counts[name] for name in ("host reads", "downloads", "pageable uploads", "pinned uploads"))


FILTERS = Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, entropy=True)


@pytest.mark.parametrize(
    ("sampling", "graphs"),
    sweep_rows([(each, graphs) for each in (Sampling(), FILTERS) for graphs in (False, True)], (FILTERS, False), (FILTERS, True)),
)
def test_a_decoding_step_reads_once_and_sends_twice(sampling: Sampling, graphs: bool) -> None:
    engine: Any = make_engine(make_runner(Network(build("llama").to(KIND)), slots=4, cuda_graphs=graphs))
    step, steps = engine._step, []

    def counted() -> None:
        with simulated_device.counting() as counts:
            step()
        steps.append(crossings(counts))

    engine._step = counted
    run_requests(engine, [Request([5 + place, 40, 200], sampling, place) for place in range(4)])
    assert set(steps[2:-1]) == {(0, 1, 0, 2)}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(grpo(), id="grpo", marks=pytest.mark.exhaustive),
        pytest.param(grpo(kl_penalty=0.2, entropy_bonus=0.1), id="terms"),
        pytest.param(SFT(), id="sft", marks=pytest.mark.exhaustive),
    ],
)
def test_micro_batches_are_sent_in_one_copy_and_read_when_the_last_is_done(algorithm: Any, precision: torch.dtype) -> None:
    """The places of their attention are a second copy: of each in bfloat16, in float32 of those with several segments."""
    batch = pack_for(simple_groups(*SHAPES), grpo())
    batch = batch.with_column("reference_logprobs", batch.rollout_logprobs - 0.2)
    for budget, parts in ((10**9, 1), (40, 2), (20, 4)):
        network = Network(build("llama").to(KIND), precision=precision, packed=True)
        learner = make_torch_learner(network, Sampling(temperature=0.9), train_tokens=budget)
        for _ in range(2):
            with simulated_device.counting() as counts:
                learner.forward_backward(batch, algorithm.loss)
            *others, sent = crossings(counts)
            assert others == [0, 2, 0], budget
            assert sent == 2 * parts if precision == torch.bfloat16 else parts < sent <= 2 * parts, budget
            with simulated_device.counting() as counts:
                learner.step()
            assert crossings(counts) == (1, 0, 0, 0)


def test_the_default_micro_batch_of_a_gpu_launches_a_step_once_where_a_cpus_launches_it_many_times() -> None:
    """Launches of a step of 64 rollouts, 4,000 tokens: in micro-batches of four longest rollouts, as before, and by default."""
    algorithm, longest = grpo(), 72
    batch = pack_for(simple_groups(*[(24, (40, 33, 48, 25))] * 16), algorithm)
    counted = {}
    for budget in (4 * longest, GPU_TOKENS):
        network = Network(build("llama").to(KIND), precision=torch.bfloat16, packed=True)
        learner = make_torch_learner(network, Sampling(), train_tokens=budget)
        learner.forward_backward(batch, algorithm.loss)
        parts = len(learner.parallelism.split_batch(batch, budget)[0])
        with simulated_device.counting() as counts:
            learner.forward_backward(batch, algorithm.loss)
        counted[budget] = parts, counts["launches"]
    (parts, before), (one, after) = counted.values()
    assert (parts, one) == (16, 1)
    assert after < before / 8


def launches_of_a_layer(network_of: Callable[[int], Network], batch: Batch) -> float:
    """Of both passes of a micro-batch whose weights have been cast."""
    found = []
    for layers in (1, 3):
        learner = make_torch_learner(network_of(layers), Sampling(), train_tokens=10**9)
        learner.forward_backward(batch, grpo().loss)
        with simulated_device.counting() as counts:
            learner.forward_backward(batch, grpo().loss)
        found.append(counts["launches"])
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("shapes", "most"), [(((11, (9, 1, 14)),), (114, 54)), (SHAPES, (116, 56))])
def test_a_layer_is_few_launches(shapes: Any, most: tuple[int, int], compiled: bool) -> None:
    """Both passes, with gradients added to those of earlier micro-batches, of one group and of several, whose keys are gathered. With the
    segments of a layer uncompiled, and compiled as on a GPU.
    """
    batch = pack_for(simple_groups(*shapes), grpo())

    def network(layers: int) -> Network:
        return Network(build("llama", layers=layers).to(KIND), precision=torch.bfloat16, packed=True)

    with simulated_device.compiled_segments() if compiled else nullcontext():
        assert launches_of_a_layer(network, batch) <= most[compiled]


def test_a_fingerprint_takes_64_mib_beside_its_tensor_and_one_read() -> None:
    for shape, dtype in (
        ((4096, 8192), torch.bfloat16),
        ((70_000, 33), torch.uint8),
        ((4096,), torch.float32),
        ((0, 3), torch.float32),
    ):
        tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
        wanted, sent = fingerprint(tensor, rows=5, columns=2), tensor.to(KIND)
        with simulated_device.counting() as counts:
            assert fingerprint(sent, rows=5, columns=2) == wanted
        assert crossings(counts) == (1, 0, 0, 0)
        assert counts["peak bytes"] < 66 * 2**20


class Counted:
    """The operators of torch, with the calls of the fused kernel counted."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name == "_flash_attention_forward"
        return getattr(torch.ops.aten, name)


@pytest.mark.parametrize("make", [make_runner, make_paged_runner])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_all_prompts_are_read_by_one_call_of_the_fused_kernel_a_layer(
    family: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what is cached and to their new tokens, with and without a window; and the learner agrees with what follows."""
    network, sampling, counted = Network(build(family).to(KIND), precision=torch.bfloat16), Sampling(max_new_tokens=5), Counted()
    engine = make_engine(make(network, slots=8, length=96, prefix_tokens=400))

    async def sample(prompts: list[list[int]]) -> list[Completion]:
        waiting = (engine.generate(prompt, sampling=sampling, seed=0, session=str(place)) for place, prompt in enumerate(prompts))
        return list(await asyncio.gather(*waiting))

    async def turns() -> tuple[list[list[int]], list[Completion]]:
        prompts = [list(range(10, 10 + length)) for length in (3, 17, 9)]
        first = await sample(prompts)
        longer = [[*prompt, *done.tokens.tolist(), 7, 8] for prompt, done in zip(prompts, first, strict=True)]
        monkeypatch.setattr(flash_libraries, "aten", counted)
        second = await sample([*longer, [99, 98]])
        await engine.close()
        return [*prompts, *longer, [99, 98]], [*first, *second]

    prompts, found = asyncio.run(turns())
    assert counted.calls == 2, "two layers"
    rollouts = [make_rollout(prompt, make_turn(done)) for prompt, done in zip(prompts, found, strict=True)]
    batch = pack_grpo([make_group(rollout) for rollout in rollouts])
    scores = NetworkScorer(network, sampling, score_tokens=200).score(batch)
    assert float((scores.logprobs - batch.rollout_logprobs).abs().max()) < 0.15


def test_layers_that_the_fused_kernel_does_not_know_read_each_prompt_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capped scores, and float32."""
    for family, precision in (("gemma2", torch.bfloat16), ("llama", torch.float32)):
        counted = Counted()
        network = Network(build(family).to(KIND), precision=precision)
        engine = make_engine(make_runner(network))
        with monkeypatch.context() as patch:
            patch.setattr(flash_libraries, "aten", counted)
            run_requests(engine, [Request(list(range(10, 30)), Sampling(max_new_tokens=2))])
        assert counted.calls == 0, family
