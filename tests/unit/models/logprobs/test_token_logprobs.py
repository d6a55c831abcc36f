"""The chunked log-probabilities against plain autograd in float64, and how much memory they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.models.logprobs.lm_head import LMHead, get_lm_head
from strop.models.logprobs.token_logprobs import token_logprobs
from strop.sampling import Sampling
from support.models import build

ROWS, WIDTH, WORDS = 23, 8, 61
EXACT = 1e-12  # float64, the order of additions


def problem(
    *, bias: bool, softcap: float | None = None, divisor: float = 1.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor, LMHead]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    head = LMHead(leaf(WORDS, WIDTH), leaf(WORDS) if bias else None, softcap=softcap, divisor=divisor, multiplier=multiplier)
    return leaf(ROWS, WIDTH), torch.randint(WORDS, (ROWS,), generator=generator), head


def plainly(hidden: Tensor, target: Tensor, head: LMHead, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits / head.divisor * head.multiplier
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logs = (logits / temperature).log_softmax(-1)
    return logs[torch.arange(len(target)), target], -(logs.exp() * logs).sum(-1)


def slopes(outputs: tuple[Tensor, Tensor], leaves: list[Tensor], weights: tuple[float, float]) -> list[Tensor]:
    """The gradient of a random combination of log-probabilities (times weights[0]) and entropies (times weights[1])."""
    generator = torch.Generator().manual_seed(1)
    total = sum(
        weight * (column * torch.randn(len(column), generator=generator, dtype=torch.float64)).sum()
        for weight, column in zip(weights, outputs, strict=True)
        if weight
    )
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(
    "shape",
    [{"bias": False}, {"bias": True}, {"bias": False, "softcap": 2.0}, {"bias": True, "divisor": 3.0, "multiplier": 0.7}],
    ids=["plain", "bias", "softcap", "scaled"],
)
def test_values_and_gradients_are_those_of_plain_autograd(shape: dict[str, Any], temperature: float, chunk: int) -> None:
    hidden, target, head = problem(**shape)
    leaves = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    wanted = plainly(hidden, target, head, temperature)
    found = token_logprobs(hidden, target, head, Sampling(temperature=temperature), chunk)
    assert float((found.logprobs - wanted[0]).detach().abs().max()) < EXACT
    assert float((found.entropy - wanted[1]).detach().abs().max()) < EXACT
    for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.3)):
        found = token_logprobs(hidden, target, head, Sampling(temperature=temperature), chunk)
        for own, plain in zip(
            slopes((found.logprobs, found.entropy), leaves, weights),
            slopes(plainly(hidden, target, head, temperature), leaves, weights),
            strict=True,
        ):
            assert float((own - plain).abs().max()) < 1e-11, weights


def test_a_filtered_distribution_is_renormalised_over_what_is_kept() -> None:
    hidden, target, head = problem(bias=False)
    sampling = Sampling(temperature=0.8, top_k=5)
    found = token_logprobs(hidden, target, head, sampling, 7)
    logits = (hidden @ head.weight.T / 0.8).detach()
    for row in range(ROWS):
        kept = set(logits[row].topk(5).indices.tolist()) | {int(target[row])}  # what was drawn was kept, whatever rounding says
        normaliser = torch.logsumexp(logits[row, sorted(kept)], 0)
        assert float(found.logprobs[row].detach()) == pytest.approx(float(logits[row, target[row]] - normaliser), abs=1e-12)


def recorded_sets(target: Tensor, largest: int) -> Tensor:
    """Random sets of 1 to ``largest`` tokens with the target among them, [N, largest] int32, padded with -1."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.full((len(target), largest), -1, dtype=torch.int32)
    for place, token in enumerate(target.tolist()):
        others = [other for other in torch.randperm(WORDS, generator=generator).tolist() if other != token]
        members = sorted([token, *others[: place % largest]])
        rows[place, : len(members)] = torch.tensor(members, dtype=torch.int32)
    return rows


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("shape", [{"bias": True}, {"bias": False, "softcap": 2.0}, {"bias": True, "divisor": 3.0}])
def test_over_recorded_sets_values_and_gradients_are_those_of_the_softmax_over_each_set(
    shape: dict[str, Any], chunk: int
) -> None:
    """Whatever the filters would keep of these logits: here top-k would keep two tokens."""
    hidden, target, head = problem(**shape)
    kept = recorded_sets(target, 6)
    candidates = torch.stack([target, kept[:, 0].long()], 1)
    leaves = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    found = token_logprobs(hidden, target, head, Sampling(temperature=0.7, top_k=2), chunk, candidates, kept)

    logits = head.compute_logits(hidden) / 0.7
    logprobs, entropies, first = [], [], []
    for row, members in enumerate(kept.tolist()):
        present = [member for member in members if member >= 0]
        logs = logits[row, present] - logits[row, present].exp().sum().log()
        logprobs.append(logs[present.index(int(target[row]))])
        entropies.append(-(logs.exp() * logs).sum())
        first.append(logs[0])
    wanted = torch.stack(logprobs), torch.stack(entropies)
    assert float((found.logprobs - wanted[0]).detach().abs().max()) < EXACT
    assert float((found.entropy - wanted[1]).detach().abs().max()) < EXACT
    assert found.candidates is not None
    assert torch.allclose(found.candidates, torch.stack([wanted[0], torch.stack(first)], 1), atol=EXACT)
    pairs = zip(slopes((found.logprobs, found.entropy), leaves, (1, -0.3)), slopes(wanted, leaves, (1, -0.3)), strict=True)
    for own, plain in pairs:
        assert float((own - plain).abs().max()) < 1e-11


def test_a_set_of_one_token_leaves_it_no_choice_and_no_gradient() -> None:
    hidden, target, head = problem(bias=False)
    found = token_logprobs(hidden, target, head, Sampling(), 7, kept=target[:, None].int())
    assert not found.logprobs.any() and not found.entropy.any()
    for slope in slopes((found.logprobs, found.entropy), [hidden, head.weight], (1.0, 1.0)):
        assert float(slope.abs().max()) < EXACT


def test_candidates_outside_the_recorded_set_could_not_be_drawn() -> None:
    hidden, target, head = problem(bias=False)
    kept = recorded_sets(target, 6)
    outside = torch.tensor([min(set(range(WORDS)) - set(row)) for row in kept.tolist()])
    found = token_logprobs(hidden, target, head, Sampling(), 7, outside[:, None], kept)
    assert found.candidates is not None
    assert bool((found.candidates == float("-inf")).all())


def test_greedy_log_probabilities_are_those_of_temperature_one() -> None:
    hidden, target, head = problem(bias=True)
    greedy = token_logprobs(hidden, target, head, Sampling(temperature=0.0), 7)
    plain = token_logprobs(hidden, target, head, Sampling(), 7)
    assert torch.equal(greedy.logprobs, plain.logprobs)


def test_without_a_gradient_to_take_none_is_kept() -> None:
    hidden, target, head = problem(bias=False)
    with torch.no_grad():
        assert not token_logprobs(hidden, target, head, Sampling(), 7).logprobs.requires_grad
    frozen = LMHead(head.weight.detach(), None)
    (slope,) = torch.autograd.grad(token_logprobs(hidden, target, frozen, Sampling(), 7).logprobs.sum(), [hidden])
    (wanted,) = torch.autograd.grad(plainly(hidden, target, frozen, 1.0)[0].sum(), [hidden])
    assert torch.allclose(slope, wanted, atol=EXACT)


class Largest(TorchDispatchMode):
    """Remembers the largest float32 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["own backward", "recomputed by autograd"])
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_more_than_a_chunk_never_exist_in_float32(softcap: float | None, autocast: bool) -> None:
    rows, words, chunk = 200, 1000, 16
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    head = LMHead(torch.randn(words, WIDTH, requires_grad=True), None, softcap=softcap)
    with Largest() as largest:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = token_logprobs(hidden, torch.randint(words, (rows,)), head, Sampling(temperature=0.9), chunk)
        (found.logprobs.sum() - 0.1 * found.entropy.sum()).backward()
    assert hidden.grad is not None
    assert chunk * words <= largest.elements, "the measurement sees a chunk's logits"
    assert largest.elements <= chunk * words, f"{rows * words} elements would be everything at once"


def test_the_head_of_a_family_knows_what_it_does_to_logits() -> None:
    for family, softcap in (("llama", None), ("gemma2", 3.0), ("qwen2", None)):
        model = build(family)
        head = get_lm_head(model)
        assert head.softcap == softcap
        tokens = torch.arange(4, 20)[None]
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=tokens).last_hidden_state
            assert torch.allclose(head.compute_logits(hidden), model(input_ids=tokens).logits, atol=1e-5)


def test_a_model_without_an_output_layer_is_refused_by_name() -> None:
    class Headless(torch.nn.Module):
        config = None

        def get_output_embeddings(self) -> Any:
            return None

    with pytest.raises(ValueError, match="Headless has no linear output layer"):
        get_lm_head(Headless())
