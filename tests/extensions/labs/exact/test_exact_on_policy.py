"""``policy.exact_on_policy``: the engine reports the learner's log-probabilities and entropies, to the last bit."""

from __future__ import annotations

import asyncio
import copy
from itertools import product

import pytest
import torch

from strop.extensions.labs.exact.exact_passes import make_network_exact
from strop.extensions.labs.exact.row_products import NotExactError
from strop.generation.torch.model_runner import CachedRunner
from strop.learner.base import require_token_outputs
from strop.learner.torch.scorer import NetworkScorer, copy_frozen
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.lora import build_with_adapters
from support.models import FAMILIES, build
from support.rollouts import make_group, make_rollout, make_turn, observation_turn, pack_grpo
from support.sweep import sweep, sweep_rows
from support.torch_engine import Request, make_engine, make_runner, run_requests

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=14, entropy=True),
    "filters": Sampling(max_new_tokens=14, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, entropy=True),
}
PROMPTS = [[5, 40, 200, 31, 7, 7, 90, 301, 12, 66, 45], [17, 300]]


def make_network(family: str, precision: torch.dtype) -> Network:
    network = Network(build(family), precision=precision)
    make_network_exact(network)
    return network


def sample(runner: CachedRunner, sampling: Sampling) -> tuple[Batch, torch.Tensor]:
    """Two groups of three rollouts as a packed batch, and the entropies that the engine reported, [N]."""
    requests = [Request(prompt, sampling, seed=10 * place + copy) for place, prompt in enumerate(PROMPTS) for copy in range(3)]
    completions = run_requests(make_engine(runner, stop_ids=(2,)), requests)
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    entropies = torch.cat([found.entropies for found in completions if found.entropies is not None])
    return pack_grpo([make_group(*rollouts[:3], index=0), make_group(*rollouts[3:], index=1)]), entropies


@pytest.mark.parametrize(
    ("family", "precision"), sweep_rows(product(FAMILIES, PRECISIONS), ("qwen2", "float32"), ("gemma2", "bfloat16"))
)
def test_every_token_has_the_learners_bits(family: str, precision: str) -> None:
    network = make_network(family, PRECISIONS[precision])
    for sampling in SAMPLINGS.values():
        batch, entropies = sample(make_runner(network), sampling)
        for budget in (30, 1000):  # micro-batches of the learner
            scores = require_token_outputs(NetworkScorer(network, sampling, score_tokens=budget).score(batch))
            assert len(batch.target) > 20
            assert torch.equal(scores.logprobs, batch.rollout_logprobs)
            assert torch.equal(scores.entropy, entropies)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_conversation_that_goes_on_from_its_cache_has_the_learners_bits(precision: str) -> None:
    network, sampling = make_network("qwen2", PRECISIONS[precision]), Sampling(max_new_tokens=5)
    engine = make_engine(make_runner(network, length=300, prefix_tokens=1000))
    prompt = [int(token) for token in torch.randint(3, 300, (130,), generator=torch.Generator().manual_seed(0))]
    rollouts = []

    async def converse() -> None:
        for seed in range(2):
            first = await engine.generate(prompt, sampling=sampling, seed=seed, session=f"s{seed}")
            history = [*prompt, *first.tokens.tolist(), 9, 8, 7]
            second = await engine.generate(history, sampling=sampling, seed=seed + 7, session=f"s{seed}")
            rollouts.append(make_rollout(prompt, make_turn(first), observation_turn([9, 8, 7], ""), make_turn(second)))
        await engine.close()

    asyncio.run(converse())
    batch = pack_grpo([make_group(*rollouts)])
    scores = require_token_outputs(NetworkScorer(network, sampling, score_tokens=1000).score(batch))
    assert torch.equal(scores.logprobs, batch.rollout_logprobs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", sweep(PRECISIONS, "bfloat16"))
def test_adapters_have_the_learners_bits(precision: str) -> None:
    network = Network(build_with_adapters("qwen2", dim=4), precision=PRECISIONS[precision])
    make_network_exact(network)
    batch, _ = sample(make_runner(network), SAMPLINGS["plain"])
    scores = require_token_outputs(NetworkScorer(network, SAMPLINGS["plain"], score_tokens=1000).score(batch))
    assert torch.equal(scores.logprobs, batch.rollout_logprobs)


def test_a_pass_with_gradients_has_the_bits_of_one_without_and_of_checkpointed_layers() -> None:
    network, sampling = make_network("qwen3", torch.bfloat16), SAMPLINGS["plain"]
    batch, _ = sample(make_runner(network), sampling)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            network.model.train()
            network.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.model.zero_grad()
        outputs = network.outputs(batch, sampling)
        assert torch.equal(outputs.logprobs, batch.rollout_logprobs)
        outputs.logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])  # qwen2 has biases
def test_the_gradient_is_that_of_an_ordinary_network(family: str) -> None:
    sampling, gradients = SAMPLINGS["plain"], []
    for exact in (True, False):
        network = Network(build(family))
        if exact:
            make_network_exact(network)
            batch, _ = sample(make_runner(network), sampling)
        network.outputs(batch, sampling).logprobs.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in network.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4 * float(gradients[1][name].abs().max()))


def test_a_frozen_copy_has_its_own_weights_and_the_ordinary_passes() -> None:
    network = make_network("llama", torch.float32)
    batch, _ = sample(make_runner(network), SAMPLINGS["plain"])
    frozen, moved = copy_frozen(network), copy.deepcopy(network.model)
    with torch.no_grad():
        for parameter in network.model.parameters():
            parameter.mul_(1.5)
    before = require_token_outputs(NetworkScorer(frozen, SAMPLINGS["plain"], 1000).score(batch)).logprobs
    assert frozen.exact is None and (before - batch.rollout_logprobs).abs().max() < 2e-5
    ordinary = Network(moved, packed=True)
    assert (
        require_token_outputs(NetworkScorer(ordinary, SAMPLINGS["plain"], 1000).score(batch)).logprobs - before
    ).abs().max() < 2e-5


@pytest.mark.filterwarnings("ignore:.*cannot read packed rows")
def test_a_model_that_cannot_be_exact_is_refused_by_name() -> None:
    with pytest.raises(NotExactError, match="exact_on_policy: RecurrentGemmaForCausalLM cannot read packed rows"):
        make_network("recurrent_gemma", torch.float32)


def test_a_model_with_an_operation_without_a_fixed_order_is_refused_and_left_as_it_was() -> None:
    network = Network(build("llama"))
    mlp = network.decoder.layers[0].mlp  # type: ignore[index, union-attr]
    plain = type(mlp).forward
    mlp.forward = lambda hidden: plain(mlp, hidden) + torch.einsum("bth,bsh->bth", hidden, hidden)
    with pytest.raises(NotExactError, match=r"LlamaModel cannot be exact: .*einsum"):
        make_network_exact(network)
    assert network.exact is None
    assert "forward" not in network.decoder.layers[0].self_attn.q_proj.__dict__  # type: ignore[index, union-attr]
