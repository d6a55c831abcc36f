"""Losses over preferences beside those of TRL's trainers: the same numbers in, the same value and gradient out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import TokenOutputs
from strop.algorithms.catalogue import all_algorithms
from support.each import each
from support.recorded import recorded_group
from support.rollouts import pack_for

pytest.importorskip("trl")

LENGTHS = (3, 5, 4, 1, 2, 2, 6, 3)  # chosen, rejected, chosen, ...; desirable, undesirable, ...
CHOSEN_FIRST = [*range(0, 8, 2), *range(1, 8, 2)]  # TRL's order
Found = tuple[float, Tensor]  # the loss, and its gradient in the log-probability of every token


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Tokens:
    """Numbers of the tokens of each completion."""

    logprobs: list[Tensor]
    reference: list[Tensor]
    squares: list[Tensor]


def draw(dtype: torch.dtype = torch.float64) -> Tokens:
    generator = torch.Generator().manual_seed(3)

    def rows() -> list[Tensor]:
        return [(-torch.rand(length, generator=generator, dtype=torch.float64) * 2 - 0.01).to(dtype) for length in LENGTHS]

    return Tokens([row.requires_grad_() for row in rows()], rows(), rows())


def differentiated(loss: Tensor, tokens: Tokens) -> Found:
    return loss.item(), torch.cat(torch.autograd.grad(loss, tokens.logprobs)).double()


def through_strop(name: str, options: dict[str, Any], tokens: Tokens, *, judged: bool = False) -> Found:
    """``judged``: each completion beside an unrelated one that does not count."""
    algorithm: Any = all_algorithms()[name](**options)
    completions = [list(range(3, 3 + length)) for length in LENGTHS]
    pairs = [(one, [9]) for one in completions] if judged else list(zip(completions[::2], completions[1::2], strict=True))
    rewards = [(1.0 - index % 2, 0.0) if judged else (1.0, 0.0) for index in range(len(pairs))]
    groups = [
        recorded_group([1, 2], *pair, rewards=reward, index=index)
        for index, (pair, reward) in enumerate(zip(pairs, rewards, strict=True))
    ]
    batch = pack_for(groups, algorithm)
    columns = (tokens.logprobs, tokens.reference, tokens.squares)
    logprobs, reference, squares = (
        torch.cat([part for row in column for part in ([row, torch.zeros(1)] if judged else [row])]) for column in columns
    )
    batch = batch.with_column("reference_logprobs", reference)
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs), log_sum_sq_probs=squares)
    batch = algorithm.prepare_step(batch, replace(outputs, logprobs=logprobs.detach()) if algorithm.needs_step_outputs else None)
    return differentiated(algorithm.loss(outputs, batch)[0], tokens)


class Model(torch.nn.Module):
    """A model of TRL's whose fused head puts out given numbers, padded with zeros."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs: list[Tensor], squares: list[Tensor]) -> None:
        super().__init__()
        values, zeros = padded(logprobs), torch.zeros(len(logprobs), max(LENGTHS))
        self.outputs = SimpleNamespace(
            log_probs=values, log_sum_sq_probs=padded(squares), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    def forward(self, **inputs: Any) -> Any:
        return self.outputs


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trainer_of(tokens: Tokens, order: list[int], **options: Any) -> tuple[Any, Model, dict[str, Any]]:
    """What a method of a trainer reads: a stand-in for the trainer, the policy, and a padded batch after a prompt of one token."""
    policy, reference = (
        Model([rows[i] for i in order], [tokens.squares[i] for i in order]) for rows in (tokens.logprobs, tokens.reference)
    )
    mask = padded([torch.cat([torch.zeros(1), torch.ones(LENGTHS[index])]) for index in order]).long()
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=policy, ref_model=reference, accelerator=accelerator, precompute_ref_logps=False, aux_loss_enabled=False, _tp_size=1,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, **options,
    )  # fmt: skip
    return trainer, policy, {"completion_mask": mask, "input_ids": mask, "attention_mask": mask}


def through_dpo_trainer(loss_type: str, options: dict[str, Any], tokens: Tokens) -> Found:
    from trl.trainer.dpo_trainer import DPOTrainer

    defaults = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "use_weighting": False}
    defaults |= {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
    args = SimpleNamespace(discopop_tau=options.get("tau", 0.05), gradient_checkpointing_kwargs=None)
    known = {**defaults, "args": args, "loss_types": [loss_type], "loss_weights": [1.0], **options}
    trainer, policy, batch = trainer_of(tokens, CHOSEN_FIRST, **known)
    return differentiated(DPOTrainer._compute_loss(trainer, policy, batch, False), tokens)


PAIRED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [  # TRL's loss type, Strop's name, options of both, of Strop alone
    ("sigmoid", "dpo", {"beta": 0.3}, {}),
    ("sigmoid", "dpo", {"beta": 0.3, "ld_alpha": 0.4}, {}),
    ("sigmoid", "dpo", {"beta": 0.3, "use_weighting": True, "ld_alpha": 0.4}, {}),
    *(
        (loss_type, name, {"beta": 0.3, "f_divergence_type": divergence}, own)
        for divergence in ("forward_kl", "js_divergence")
        for loss_type, name, own in (
            ("sigmoid", "dpo", {}),
            ("sigmoid_norm", "dpo", {"average_log_probs": True}),
            ("ipo", "ipo", {}),
            ("hinge", "slic", {}),
        )
    ),
    ("robust", "robust_dpo", {"beta": 0.3, "label_smoothing": 0.2, "f_divergence_type": "js_divergence"}, {}),
    ("exo_pair", "exo_pair", {"beta": 0.3, "label_smoothing": 1e-3}, {}),
    ("exo_pair", "exo_pair", {"beta": 2.0, "label_smoothing": 0.2, "f_divergence_type": "forward_kl"}, {}),
    ("nca_pair", "nca_pair", {"beta": 0.3, "use_weighting": True}, {}),
    ("bco_pair", "bco_pair", {"beta": 0.3}, {}),
    ("sppo_hard", "sppo_hard", {"beta": 0.3}, {}),
    ("aot", "aot", {"beta": 0.3, "label_smoothing": 0.1}, {}),
    ("aot", "aot", {"beta": 0.3, "ld_alpha": 0.4}, {}),
    ("aot_unpaired", "aot_unpaired", {"beta": 0.3, "label_smoothing": 0.1}, {}),
    ("discopop", "discopop", {"beta": 0.3, "tau": 0.05}, {}),
    ("discopop", "discopop", {"beta": 0.3, "tau": 0.5, "f_divergence_type": "js_divergence"}, {}),
]  # fmt: skip


@each("case", PAIRED)
def test_a_loss_over_pairs_is_that_of_trl(case: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
    loss_type, name, options, own = case
    tokens = draw()
    assert_same(through_strop(name, options | own, tokens), through_dpo_trainer(loss_type, options, tokens))


def test_an_alpha_divergence_is_that_of_trl() -> None:
    """TRL computes it in float32 only."""
    tokens, options = draw(torch.float32), {"beta": 0.3, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}
    assert_same(through_strop("dpo", options, tokens), through_dpo_trainer("sigmoid", options, tokens), rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_loss_over_judgements_is_that_of_trl(loss_type: str) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, options = draw(), {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    trainer, policy, batch = trainer_of(
        tokens, list(range(8)), loss_type=loss_type, calculate_KL=False, args=SimpleNamespace(gradient_checkpointing_kwargs=None), **options
    )  # fmt: skip
    trainer._compute_kl_logps = lambda model, batch: None
    labels = [index % 2 == 0 for index in range(8)]
    wanted = differentiated(KTOTrainer._compute_loss(trainer, policy, {**batch, "label": labels_of(labels)}, False), tokens)
    assert_same(through_strop(loss_type, options, tokens, judged=True), wanted)  # KTO's reference point is 0 here


def labels_of(labels: list[bool]) -> Tensor:
    return torch.tensor(labels)


CONTRASTIVE: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [  # Strop's name and options, TRL's options, averaged over tokens
    ("cpo", {"label_smoothing": 0.2}, {"loss_type": "sigmoid", "label_smoothing": 0.2}, False),
    ("cpo", {"loss_type": "hinge"}, {"loss_type": "hinge"}, False),
    ("cpo", {"loss_type": "ipo", "average_log_probs": True}, {"loss_type": "ipo"}, True),
    ("cpo", {"alpha": 0.1}, {"loss_type": "sigmoid", "alpha": 0.1}, False),
    ("simpo", {"gamma": 0.5, "label_smoothing": 0.1}, {"loss_type": "simpo", "simpo_gamma": 0.5, "label_smoothing": 0.1}, True),
    ("alphapo", {"gamma": 0.5, "alpha": 0.25}, {"loss_type": "simpo", "simpo_gamma": 0.5, "alpha": 0.25}, True),
    ("alphapo", {"gamma": 0.5, "alpha": -0.4}, {"loss_type": "simpo", "simpo_gamma": 0.5, "alpha": -0.4}, True),
]  # fmt: skip


@each("case", CONTRASTIVE)
def test_a_loss_without_a_reference_is_that_of_trl(case: tuple[str, dict[str, Any], dict[str, Any], bool]) -> None:
    name, options, theirs, averaged = case
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    tokens = draw()
    trainer = SimpleNamespace(
        **{"alpha": 0.0, "beta": 0.7, "label_smoothing": 0.0, "simpo_gamma": 0.0, **theirs},
        accelerator=SimpleNamespace(device="cpu"),
    )
    logprobs = torch.stack([row.mean() if averaged else row.sum() for row in tokens.logprobs])
    losses, _, _ = CPOTrainer.cpo_loss(trainer, logprobs[::2], logprobs[1::2])
    chosen = torch.cat(tokens.logprobs[::2])
    weight = 0.6 if name == "cpo" else 0.0  # of the likelihood of the chosen, TRL's cpo_alpha: a mean over tokens
    wanted = differentiated(losses.mean() - weight * chosen.mean(), tokens)
    assert_same(through_strop(name, {"beta": 0.7, "sft_weight": weight, **options}, tokens), wanted)


def assert_same(found: Found, wanted: Found, rtol: float = 1e-9) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=rtol)
    torch.testing.assert_close(found[1], wanted[1], rtol=rtol, atol=rtol)
