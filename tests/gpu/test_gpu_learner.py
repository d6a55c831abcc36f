"""The learner on a GPU says what it says on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.algorithms.policy_gradient.grpo import GRPO
from strop.gpus import KIND
from strop.learner.torch.scorer import NetworkScorer, offload
from strop.models.attention.attention_plan import AttentionSpec, causal_mask, masked_attention
from strop.models.network import Network
from strop.runs.models import select_device
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import FAMILIES, build, copy_gradients, largest_difference, to_float64, with_exact_rotary
from support.rollouts import pack_for, simple_groups
from support.sweep import sweep

pytestmark = pytest.mark.gpu

GPU = torch.get_device_module(KIND)

SHAPES = ((11, (9, 1, 14)), (2, (5,)), (5, (20, 3)))
FLOAT32 = 1e-4  # other kernels, other orders of addition
OPTIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "sequence_ratio": {"sequence_ratio": True},
    "kl_in_the_loss": {"kl_penalty": 0.2},
    "overlong_filtering": {"overlong_filtering": True},
}


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """TensorFloat-32 off, so that float32 means float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def batch_of(algorithm: GRPO) -> Batch:
    batch = pack_for(simple_groups(*SHAPES), algorithm)
    return algorithm.token_credit(batch.with_column("reference_logprobs", batch.rollout_logprobs - 0.2))


def gradient_on(device: str, algorithm: GRPO, *, budget: int = 10**9, packed: bool = True) -> tuple[dict[str, torch.Tensor], Any]:
    model = with_exact_rotary(to_float64(build("llama")).to(device))
    network = Network(model, precision=torch.float64, packed=packed, chunk=13)
    learner = make_torch_learner(network, Sampling(temperature=0.9), train_tokens=budget)
    result = learner.forward_backward(batch_of(algorithm), algorithm.loss)
    return {name: tensor.cpu() for name, tensor in copy_gradients(model).items()}, result


@pytest.mark.parametrize("name", sweep(OPTIONS, "sequence_ratio", "kl_in_the_loss"))
def test_gradients_and_metrics_on_the_gpu_are_those_on_the_cpu(name: str) -> None:
    """float64: 1e-9 relative, however the batch is cut."""
    algorithm = grpo(**OPTIONS[name])
    wanted, result = gradient_on("cpu", algorithm)
    for budget in (10**9, 20):
        for packed in (True, False):
            found, other = gradient_on(KIND, algorithm, budget=budget, packed=packed)
            assert largest_difference(found, wanted) < 1e-9, (budget, packed)
            assert other.metrics["loss"].value == pytest.approx(result.metrics["loss"].value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("family", sweep(FAMILIES, "llama", "gemma2", "gpt_oss"))
def test_log_probabilities_on_the_gpu_are_those_on_the_cpu(family: str) -> None:
    batch = batch_of(grpo())
    found = []
    for device in ("cpu", KIND):
        network = Network(build(family).to(device))
        assert network.packed, network.fallback
        with torch.no_grad():
            outputs = network.outputs(batch, Sampling(temperature=0.8, top_k=100))
        found.append((outputs.logprobs.cpu(), outputs.entropy.cpu()))
    assert float((found[0][0] - found[1][0]).abs().max()) < FLOAT32
    assert float((found[0][1] - found[1][1]).abs().max()) < FLOAT32


def test_an_offloaded_reference_leaves_the_gpu_between_uses_and_says_the_same() -> None:
    batch = batch_of(grpo())
    stays = NetworkScorer(Network(build("llama").to(KIND)), Sampling(), score_tokens=30)
    network = Network(build("llama").to(KIND))
    leaves = NetworkScorer(network, Sampling(), score_tokens=30, context=offload(network))
    assert {parameter.device.type for parameter in leaves.network.model.parameters()} == {"cpu"}
    found = leaves.score(batch)
    assert {parameter.device.type for parameter in leaves.network.model.parameters()} == {"cpu"}
    assert torch.equal(found.logprobs, stays.score(batch).logprobs)


def test_logits_of_a_large_vocabulary_do_not_fill_the_memory() -> None:
    """4,096 tokens x 50,000 words are 820 MB of float32 logits; chunks of 256 rows are 51 MB each. Simulated, a twentieth of it."""
    from strop.models.logprobs.lm_head import LMHead
    from strop.models.logprobs.token_logprobs import token_logprobs

    rows, words, width, chunk = (4096, 50_000, 64, 256) if KIND == "cuda" else (1024, 10_000, 64, 64)
    hidden = torch.randn(rows, width, device=KIND, requires_grad=True)
    head = LMHead(torch.randn(words, width, device=KIND, requires_grad=True), None)
    target = torch.randint(words, (rows,), device=KIND)
    GPU.synchronize()
    GPU.reset_peak_memory_stats()
    before = GPU.memory_allocated()
    outputs = token_logprobs(hidden, target, head, Sampling(temperature=0.9), chunk)
    (outputs.logprobs.sum() - 0.1 * outputs.entropy.sum()).backward()
    grown = GPU.max_memory_allocated() - before
    assert grown < 8 * chunk * words * 4, "a few chunks at a time"
    assert grown < rows * words * 4 * 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, -0.3)], ids=["log-probabilities", "entropies too"])
def test_tritons_kernels_give_the_numbers_of_pytorchs_operators(
    dtype: torch.dtype, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.models.logprobs import token_logprobs as module
    from strop.models.logprobs.lm_head import TorchTiles

    assert type(module.choose_operations(torch.device(KIND), dtype)).__name__ == "TritonRows"
    leaves = [
        torch.randn(300, 64, device=KIND),
        0.3 * torch.randn(50_001, 64, device=KIND),
        torch.randn(50_001, device=KIND),
    ]
    target = torch.randint(50_001, (300,), device=KIND)
    found = []
    for operations in (module.choose_operations, lambda device, dtype: TorchTiles()):
        monkeypatch.setattr(module, "choose_operations", operations)
        hidden, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        outputs = module.tiled_logprobs(hidden, target, weight, bias, 0.8, 128)
        total = sum(by * column.sum() for by, column in zip(weights, outputs, strict=True))
        found.append([*outputs, *torch.autograd.grad(total, [hidden, weight, bias])])  # type: ignore[arg-type]
    for triton, torchs in zip(*found, strict=True):
        error = (triton.detach().float() - torchs.detach().float()).abs().max() / torchs.detach().float().abs().max()
        assert float(error) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_attention_to_a_shared_prefix_stores_no_scores() -> None:
    """A mask and fewer key-value heads at once: torch has kernels for both only since some version, and falls back without a word."""
    heads, groups, queries, keys = 16, 4, 2048, 4096
    query = torch.randn(2, heads, queries, 64, device=KIND, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(2, groups, keys, 64, device=KIND, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = causal_mask(queries, keys, None, query.device)
    GPU.reset_peak_memory_stats()
    before = GPU.memory_allocated()
    masked_attention(query, key, value, mask, AttentionSpec(0, 0.125)).sum().backward()
    scores = 2 * heads * queries * keys * 2  # bytes
    assert GPU.max_memory_allocated() - before < scores


def test_a_run_on_another_gpu_than_the_first_computes_there() -> None:
    if GPU.device_count() < 2:
        pytest.skip("one GPU only")
    select_device("cuda:1")
    try:
        assert GPU.current_device() == 1
    finally:
        GPU.set_device(0)
