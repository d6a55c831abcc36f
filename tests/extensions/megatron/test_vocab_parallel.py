"""Log-probabilities over a divided vocabulary are those of the whole output layer, and so are their gradients."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.collectives import copy_to_ranks
from strop.models.logprobs.lm_head import LMHead
from strop.models.logprobs.token_logprobs import token_logprobs
from strop.sampling import Sampling
from support.needs import needs_megatron

needs_megatron()
dist: Any = torch.distributed

ROWS, WIDTH, VOCABULARY, RANKS = 13, 6, 21, 2  # an odd vocabulary: one row of the last rank is padding
PLAIN = Sampling(temperature=0.7)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"sampling": PLAIN},
    "temperature 1": {"sampling": Sampling()},
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "softcap": {"sampling": PLAIN, "softcap": 2.0},
    "divisor": {"sampling": PLAIN, "divisor": 3.0},
    "filters": {"sampling": Sampling(temperature=0.9, top_k=9, top_p=0.8, min_p=0.01)},
    "candidates": {"sampling": PLAIN, "candidates": True},
    "squares": {"sampling": PLAIN, "squares": True},
    "kept": {"sampling": Sampling(top_k=5), "kept": True},
    "kept, candidates, squares": {
        "sampling": Sampling(top_k=5, temperature=0.5),
        "kept": True,
        "candidates": True,
        "squares": True,
    },
    "softcap, candidates, squares": {"sampling": PLAIN, "softcap": 2.0, "candidates": True, "squares": True},
}


def _inputs(case: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    target = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
    others = torch.randint(0, VOCABULARY, (ROWS, 4), generator=draw)
    kept = torch.cat([target[:, None], torch.full((ROWS, 1), VOCABULARY - 1), torch.full((ROWS, 1), -1)], 1)
    return {
        "hidden": torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64),
        "weight": torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64),
        "target": target,
        "candidates": torch.cat([others, target[:, None]], 1) if case.get("candidates") else None,
        "kept": kept.to(torch.int32) if case.get("kept") else None,
        "mix": torch.randn(ROWS, 2, generator=draw, dtype=torch.float64),
    }


def _value(outputs: Any, mix: Tensor) -> Tensor:
    value: Tensor = (outputs.logprobs * mix[:, 0] + outputs.entropy * mix[:, 1]).sum()
    if outputs.candidates is not None:
        value = value + outputs.candidates.masked_fill(outputs.candidates == float("-inf"), 0.0).square().sum()
    return value


def _columns(outputs: Any) -> list[Tensor]:
    found = (outputs.logprobs, outputs.entropy, outputs.candidates, outputs.log_sum_sq_probs)
    return [column.detach() for column in found if column is not None]


def _transform(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("softcap", "divisor") if name in case}


def compute_on_rank(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from strop.extensions.megatron.vocab_parallel import VocabParallelHead, vocab_parallel_logprobs

    found = {}
    share = -(-VOCABULARY // RANKS)
    for name, case in cases.items():
        given = _inputs(case)
        whole = torch.cat([given["weight"], torch.zeros(RANKS * share - VOCABULARY, WIDTH, dtype=torch.float64)])
        weight = whole[rank * share : (rank + 1) * share].clone().requires_grad_()
        hidden = given["hidden"].clone().requires_grad_()
        head = VocabParallelHead(LMHead(weight, None, **_transform(case)), VOCABULARY, dist.group.WORLD)
        arguments = (given["target"], head, case["sampling"], 4, given["candidates"], given["kept"])
        outputs = vocab_parallel_logprobs(
            copy_to_ranks(hidden, dist.group.WORLD), *arguments, squared_probs=case.get("squares", False)
        )
        _value(outputs, given["mix"]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            again = vocab_parallel_logprobs(hidden, *arguments, squared_probs=case.get("squares", False))
        found[name] = (_columns(outputs), _columns(again), hidden.grad, weight.grad)
    return found


def test_a_divided_vocabulary_gives_the_numbers_of_a_whole_one() -> None:
    ranks = run_on_ranks(RANKS, compute_on_rank, CASES)
    for name, case in CASES.items():
        given = _inputs(case)
        hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
        wanted = token_logprobs(
            hidden,
            given["target"],
            LMHead(weight, None, **_transform(case)),
            case["sampling"],
            4,
            given["candidates"],
            given["kept"],
            squared_probs=case.get("squares", False),
        )
        _value(wanted, given["mix"]).backward()  # type: ignore[no-untyped-call]
        for rank in ranks:
            columns, again, hidden_grad, _ = rank[name]
            for found in (columns, again):
                torch.testing.assert_close(found, _columns(wanted), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-11, atol=1e-12)
        gradient = torch.cat([rank[name][3] for rank in ranks])
        torch.testing.assert_close(gradient[:VOCABULARY], weight.grad, rtol=1e-11, atol=1e-12)
        assert not gradient[VOCABULARY:].any(), f"{name}: rows that pad the vocabulary have no gradient"
