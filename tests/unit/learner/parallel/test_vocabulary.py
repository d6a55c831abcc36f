"""An embedding and an output layer whose rows are divided over tensor ranks: results of one process, in a part of the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from tests.support.sharded import build_float64_model, compute_loss, gather_gradient, random_tokens
from tests.unit.models.attention.test_attention_memory import peak_bytes
from torch import Tensor

from strop.learner.parallel.collectives import join_rows, local_rows
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.tensor_parallel import TokenRange, apply_tensor_parallel
from strop.models.logprobs.lm_head import LMHead
from strop.models.logprobs.token_logprobs import token_logprobs
from strop.sampling import Sampling
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import CONFIGS
from support.parity import SAMPLING, Case, build_trained_network, make_batch
from support.sweep import sweep, sweep_rows

dist: Any = torch.distributed
ROWS, WIDTH, WORDS = 24, 8, 61  # the last rank has fewer words
HEADS: dict[str, dict[str, float]] = {"linear": {}, "softcap": {"softcap": 2.0, "divisor": 3.0, "multiplier": 0.7}}
REQUESTS: dict[str, dict[str, Any]] = {
    "softmax": {"sampling": Sampling(temperature=0.7)},
    "filters": {"sampling": Sampling(temperature=1.3, top_k=20, top_p=0.9)},
    "min_p": {"sampling": Sampling(min_p=0.05), "squared_probs": True},
    "candidates": {"sampling": Sampling(), "candidates": 5, "squared_probs": True},
    "kept": {"sampling": Sampling(temperature=0.9), "candidates": 3, "kept": 7},
}


def compute(head: LMHead, hidden: Tensor, columns: dict[str, Tensor], request: dict[str, Any]) -> Tensor:
    """[n, outputs]"""
    ids = {name: columns[name][:, : request[name]] for name in ("candidates", "kept") if name in request}
    found = token_logprobs(
        hidden, columns["target"], head, request["sampling"], 3, **ids, squared_probs=request.get("squared_probs", False)
    )
    more = [] if found.candidates is None else [found.candidates.masked_fill(found.candidates.isinf(), 0.0)]
    more += [] if found.log_sum_sq_probs is None else [found.log_sum_sq_probs[:, None]]
    return torch.cat([found.logprobs[:, None], found.entropy[:, None], *more], 1)


def compare_outputs(rank: int) -> dict[str, float]:
    """The largest difference of outputs and gradients, by head and request."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (WORDS,))
    )
    kept = torch.stack([torch.randperm(WORDS, generator=generator)[:7] for _ in range(ROWS)])
    columns = {"target": kept[:, 0], "candidates": torch.randint(WORDS, (ROWS, 5), generator=generator), "kept": kept}
    group, ranks = dist.group.WORLD, dist.get_world_size()
    division = TokenRange(WORDS, -(-WORDS // ranks), group)
    own = slice(division.first, division.first + division.width)
    found: dict[str, float] = {}
    for kind, transform in HEADS.items():
        for name, request in REQUESTS.items():
            wanted = compute(LMHead(weight, bias, **transform), hidden, columns, request)
            slopes = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
            whole = torch.autograd.grad((wanted * slopes).sum(), (hidden, weight, bias))
            part = [each.detach().clone().requires_grad_() for each in (local_rows(hidden, group), weight[own], bias[own])]
            head = LMHead(part[1], part[2], **transform, division=division)
            rows = {name: local_rows(column, group) for name, column in columns.items()}
            got = join_rows(compute(head, part[0], rows, request), group)
            gradients = torch.autograd.grad((got * slopes).sum(), part)
            pairs = [(got, wanted), *zip(gradients, (local_rows(whole[0], group), whole[1][own], whole[2][own]), strict=True)]
            found[f"{kind}, {name}"] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return found


@pytest.mark.parametrize("ranks", sweep([2, 4], 2))
def test_divided_rows_of_the_output_layer_give_the_outputs_and_gradients_of_whole_ones(ranks: int) -> None:
    for found in run_on_ranks(ranks, compare_outputs):
        assert len(found) == len(HEADS) * len(REQUESTS)
        assert {name: worst for name, worst in found.items() if not worst < 1e-12} == {}


def embed_padding(rank: int) -> list[float]:
    """Differences of the embedding's gradient, of the padding token's and all rows."""
    tokens = torch.cat([torch.zeros(3, dtype=torch.int64), random_tokens(17, 0)])
    whole, divided = build_float64_model("llama"), build_float64_model("llama")
    meshes = DeviceMeshes(ParallelDims(tensor=2), "cpu")
    apply_tensor_parallel(divided, meshes)
    compute_loss(whole, tokens).backward()
    compute_loss(divided, tokens, meshes).backward()
    wanted, found = whole.get_input_embeddings().weight.grad, gather_gradient(divided.get_input_embeddings().weight)
    return [float(wanted[0].abs().max()), float(found[0].abs().max()), float((found - wanted).abs().max())]


def test_the_padding_token_has_no_gradient_on_the_rank_that_has_it() -> None:
    for of_one_process, of_ranks, difference in run_on_ranks(2, embed_padding):
        assert of_one_process == of_ranks == 0.0
        assert difference < 1e-12


LARGE = 50_000  # a vocabulary that weighs more than everything else
UNTIED = Case(sizes=ParallelDims(tensor=2), dtype=torch.float32)


def measure_step(rank: int, tied: bool) -> tuple[int, int, int]:
    """Numbers of a whole embedding, and peak bytes of a first optimizer step in one process and on this rank."""
    family = "qwen2" if tied else "llama"
    make = CONFIGS[family]
    case = replace(UNTIED, family=family)
    batch = replace(make_batch(case), zero_gradient=None)

    def enlarged() -> Any:
        config = make()
        config.vocab_size = LARGE
        return config

    CONFIGS[family] = enlarged
    peaks = []
    for meshes in (None, DeviceMeshes(case.sizes, "cpu")):
        network, placement = build_trained_network(case, meshes)
        learner = make_torch_learner(network, SAMPLING, placement, train_tokens=10**6)

        def take_step(learner: Any = learner) -> None:
            learner.forward_backward_local(batch, grpo().loss)
            learner.step()

        peaks.append(peak_bytes(take_step))
    return LARGE * 32, *peaks


@pytest.mark.parametrize(("tied", "most"), sweep_rows([(False, 12.1), (True, 8.1)], (True, 8.1)))
def test_a_rank_of_two_needs_half_of_the_vocabularys_memory(tied: bool, most: float) -> None:
    """Whole, gradients and Adam's two moments take 24 bytes a number, and 12 where both matrices are one."""
    for numbers, alone, divided in run_on_ranks(2, measure_step, tied):
        assert alone > (12 if tied else 24) * numbers
        assert divided < most * numbers  # tied: two gradients and the gathered weight at the end of the backward pass
