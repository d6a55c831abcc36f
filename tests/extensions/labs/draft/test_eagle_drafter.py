"""Speculation with a draft head in the embedded engine: no token changes, and drafts are the head's own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.extensions.labs.draft.eagle_drafter import EagleDrafter, keep_or_redraw
from strop.extensions.labs.draft.eagle_head import StateCapture
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.models.attention.tree_plan import TreePlan
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed
from support.drafts import make_learned_head
from support.models import build
from support.torch_engine import Request, cache_config, make_engine, make_runner, run_requests


@pytest.fixture(scope="module")
def network() -> Network:
    network = Network(build("llama", layers=3))
    make_learned_head(network)
    return network


def make_drafting(
    network: Network,
    *,
    count: int = 3,
    slots: int = 4,
    prepack: bool | None = False,
    pages: int = 12,
    rejection: bool = False,
) -> TorchEngine:
    from strop.generation.torch.model_runner import infer_cache_shape

    memory = pages * 16 * (infer_cache_shape(network).bytes_per_token + 4 * 32)
    config = replace(cache_config(memory, slots=slots, prepack_weights=prepack), speculative_draft=count, paged_cache=True)
    runner = PagedRunner(network, config, length=48, page=16)
    return make_engine(runner, drafter=EagleDrafter(network, runner, count, rejection=rejection))


def requests(options: Sampling, count: int = 6) -> list[Request]:
    prompts = [[7, 8, 9, 10] * 4 + [5], [7, 8, 9, 10] * 4 + [5], [11], list(range(20, 40)), list(range(20, 37)), [3, 4]]
    return [Request(prompts[place % 6], replace(options, max_new_tokens=24 - place), seed=place) for place in range(count)]


OPTIONS = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=5, temperature=0.7)]


@pytest.mark.parametrize(
    ("options", "prepack"),
    [
        pytest.param(OPTIONS[0], None, id="plain-kernels"),
        pytest.param(OPTIONS[2], False, id="filtered-modules"),
        *(
            pytest.param(options, prepack, id=f"all-{name}-{kind}", marks=pytest.mark.exhaustive)
            for name, options in zip(("plain", "greedy", "filtered"), OPTIONS, strict=True)
            for kind, prepack in (("modules", False), ("kernels", None))
        ),
    ],
)
def test_a_head_changes_no_token(network: Network, options: Sampling, prepack: bool | None) -> None:
    wanted = run_requests(make_engine(make_runner(network)), requests(options))
    engine = make_drafting(network, prepack=prepack)
    found = run_requests(engine, requests(options))
    for left, right in zip(found, wanted, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()
        assert torch.allclose(left.logprobs, right.logprobs, atol=1e-4)
    counts = engine.counters
    assert counts.drafts > 0 and 0 < counts.accepted_tokens < counts.drafted_tokens
    logged = engine.collect_metrics()
    assert logged["generation/acceptance_rate"] == counts.accepted_tokens / counts.drafted_tokens
    assert logged["generation/tokens_per_draft"] == 1 + counts.accepted_tokens / counts.drafts


@pytest.mark.exhaustive
def test_a_head_changes_no_token_where_memory_runs_short(network: Network) -> None:
    options = Sampling()
    wanted = run_requests(make_engine(make_runner(network)), requests(options, 12))
    engine = make_drafting(network, slots=6, pages=5)
    found = run_requests(engine, requests(options, 12))
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in wanted]
    assert engine.counters.preemptions > 0 and engine.counters.accepted_tokens > 0
    assert engine.drafter is not None and not engine.drafter._progress


def draft_slowly(network: Network, sequence: list[int], count: int) -> list[int]:
    """The head's greedy tokens after a sequence, reading all of it again for each."""
    head = network.draft
    assert head is not None
    read = torch.tensor(sequence[:-1])
    one = (torch.tensor([0]), torch.tensor([len(read)]), torch.tensor([-1]), network.device)
    network.use_plan_attention()
    capture = StateCapture(network.decoder, head.shape.aux_layers)
    with capture.active():
        network.decoder(input_ids=read[None], position_ids=torch.arange(len(read))[None], plan=TreePlan(*one), use_cache=False)
    states: Tensor = head.fuse(capture.take())
    found: list[int] = []
    for _ in range(count):
        tokens = torch.tensor([*sequence[1:], *found])
        plan = TreePlan(torch.tensor([0]), torch.tensor([len(tokens)]), torch.tensor([-1]), network.device)
        hidden = head(network.model.get_input_embeddings()(tokens), states, torch.arange(len(tokens)), plan)
        found.append(int(head.lm_head(head.norm(hidden[-1])).argmax()))
        states = torch.cat([states, hidden[-1:]])
    return found


Drafts = list[tuple[list[int], list[int]]]  # what was read, and the tokens proposed after it


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """What every drafter proposes."""
    seen: Drafts = []
    propose = EagleDrafter.propose

    def keep(self: EagleDrafter, running: Any, limits: Any) -> list[list[int]]:
        found = propose(self, running, limits)
        seen.extend(([*each.prompt, *each.tokens], draft) for each, draft in zip(running, found, strict=True) if draft)
        return found

    monkeypatch.setattr(EagleDrafter, "propose", keep)
    return seen


@pytest.mark.parametrize(
    "prepack", [pytest.param(False, id="modules", marks=pytest.mark.exhaustive), pytest.param(None, id="kernels")]
)
def test_drafts_are_those_of_a_head_that_reads_everything_again(network: Network, seen: Drafts, prepack: bool | None) -> None:
    run_requests(make_drafting(network, prepack=prepack), requests(Sampling(temperature=0.0)))
    assert len(seen) > 20 and max(len(draft) for _, draft in seen) == 3
    with torch.no_grad():
        for sequence, draft in seen[::2]:
            assert draft == draft_slowly(network, sequence, len(draft))


@pytest.mark.exhaustive
def test_drafts_after_a_publish_in_the_middle_read_what_the_new_weights_make_of_everything(seen: Drafts) -> None:
    async def run() -> None:
        engine = make_drafting(network)
        options = Sampling(temperature=0.0, max_new_tokens=24)
        asked = [asyncio.create_task(engine.generate([*range(20, 36), seed], sampling=options, seed=seed)) for seed in range(2)]
        while engine.counters.decode_steps < 4:
            await asyncio.sleep(0)
        engine.freeze()
        with torch.no_grad():
            for layer in network.decoder.layers:  # type: ignore[union-attr]
                layer.self_attn.v_proj.weight.mul_(-2.0)
        engine.activate_version(1)
        seen.clear()
        engine.recompute_running()
        engine.resume_requests()
        await asyncio.gather(*asked)
        await engine.close()

    network = Network(build("llama", layers=3))
    make_learned_head(network)
    asyncio.run(run())
    assert len(seen) > 5
    with torch.no_grad():
        for sequence, draft in seen:
            assert draft == draft_slowly(network, sequence, len(draft))


@pytest.mark.parametrize("rejection", [False, True], ids=["coupled", "rejection"])
def test_sampling_with_a_head_follows_the_models_distribution(network: Network, rejection: bool) -> None:
    """Chi-square of the second token of 1,500 requests, drafted each time."""
    prompt = [7, 8, 9]
    network.use_native_attention()
    with torch.no_grad():
        first = int(network.model(torch.tensor([prompt])).logits[0, -1].argmax())
        logits = network.model(torch.tensor([[*prompt, first]])).logits[0, -1]
    network.use_learner_attention()
    kept = logits.topk(6).indices
    asked = [Request(prompt, Sampling(max_new_tokens=3, top_k=6), seed=mix_seed(4, place)) for place in range(1500)]
    engine = make_drafting(network, slots=64, pages=200, rejection=rejection)
    found = run_requests(engine, asked)
    assert engine.counters.drafts == 1500 and engine.counters.accepted_tokens > 20
    second = torch.tensor([int(each.tokens[1]) for each in found if int(each.tokens[0]) == first])
    expected = logits[kept].softmax(-1) * len(second)
    counts = torch.tensor([float((second == token).sum()) for token in kept])
    assert float(counts.sum()) == len(second) > 200
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5, "chi-square with 5 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_is_kept_as_often_as_the_distributions_overlap(seed: int) -> None:
    """Chi-square of 20,000 verified drafts, and of how many are kept."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, 6, generator=generator) * 1.5
    sampling, draws = Sampling(temperature=0.8), 20_000
    p, q = (logits / 0.8).softmax(-1), other.softmax(-1)
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator)
    numbers = torch.rand(2, draws, generator=generator)
    rows = (logits.expand(draws, -1), q.expand(draws, -1), drafts, [sampling] * draws)
    tokens, logprobs = keep_or_redraw(*rows, numbers[0], numbers[1])
    assert torch.allclose(logprobs, p.log()[tokens], atol=1e-5)
    counts = torch.bincount(tokens, minlength=6)
    assert float(((counts - draws * p) ** 2 / (draws * p)).sum()) < 20.5, "chi-square with 5 degrees of freedom, p = 0.001"
    overlap = float(torch.minimum(p, q).sum())
    kept = float((tokens == drafts).float().mean())
    assert abs(kept - overlap) < 3.3 * (overlap * (1 - overlap) / draws) ** 0.5


@pytest.mark.exhaustive
def test_rejection_keeps_more_drafts_and_gives_the_log_probabilities_of_the_policy(network: Network) -> None:
    coupled, rejecting = make_drafting(network), make_drafting(network, rejection=True)
    sampling = Sampling(temperature=0.7)
    run_requests(coupled, requests(sampling, 12))
    found = run_requests(rejecting, requests(sampling, 12))
    rates = [each.counters.accepted_tokens / each.counters.drafted_tokens for each in (coupled, rejecting)]
    assert rates[1] > rates[0]
    network.use_native_attention()
    for request, each in zip(requests(sampling, 12), found, strict=True):
        row = torch.cat([torch.tensor(list(request.prompt)), each.tokens])
        with torch.no_grad():
            logs = (network.model(row[None]).logits[0, len(request.prompt) - 1 : -1] / 0.7).log_softmax(-1)
        assert torch.allclose(each.logprobs, logs.gather(1, each.tokens[:, None])[:, 0], atol=1e-4)
    network.use_learner_attention()


def test_a_head_with_the_policys_distribution_is_always_right(network: Network, monkeypatch: Any) -> None:
    """Drafts drawn from the policy's own logits with the same numbers are accepted, all of them: that is the coupling."""
    wanted = run_requests(make_engine(make_runner(network)), requests(Sampling()))
    whole = [[*request.prompt, *each.tokens.tolist()] for request, each in zip(requests(Sampling()), wanted, strict=True)]

    def know(self: EagleDrafter, running: Any, limits: Any) -> list[list[int]]:
        found = []
        for request, limit in zip(running, limits, strict=True):
            so_far = [*request.prompt, *request.tokens]
            tokens = next(each for each in whole if each[: len(so_far)] == so_far)
            found.append(tokens[len(so_far) : len(so_far) + max(limit, 0)])
        return found

    monkeypatch.setattr(EagleDrafter, "propose", know)
    engine = make_drafting(network)
    run_requests(engine, requests(Sampling()))
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens > 0


def test_an_engine_without_pages_says_that_it_does_not_draft(network: Network, caplog: Any) -> None:
    config = replace(cache_config(1e6, slots=2), speculative_draft=3, paged_cache=False)
    with caplog.at_level("WARNING"):
        engine = make_torch_engine(network, None, config, length=48, stop_ids=())
    assert engine.drafter is None and "speculative_draft needs a paged cache" in caplog.text
