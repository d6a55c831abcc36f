"""Losses as TRL's trainers compute them, from given log-probabilities, and Strop's from the same."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.cases import Step
from conformance.formulas_common import constant
from conformance.harness import Leaves, Outcome
from strop.algorithm_factory import all_algorithms
from strop.algorithms.base import TokenOutputs
from support.recorded import recorded_group
from support.rollouts import pack_for

LENGTHS = (3, 5, 4, 1, 2, 2, 6, 3)  # chosen, rejected, chosen, ...; desirable, undesirable, ...
CHOSEN_FIRST = [*range(0, 8, 2), *range(1, 8, 2)]  # TRL's order
Found = tuple[float, Tensor]  # the loss, and its gradient in the log-probability of every token


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


def through_kto_trainer(loss_type: str, options: dict[str, Any], tokens: Tokens) -> Found:
    """KTO's reference point is 0 here."""
    from trl.trainer.kto_trainer import KTOTrainer

    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    known = {"loss_type": loss_type, "calculate_KL": False, "args": args, **options}
    trainer, policy, batch = trainer_of(tokens, list(range(8)), **known)
    trainer._compute_kl_logps = lambda model, batch: None
    labels = torch.tensor([index % 2 == 0 for index in range(8)])
    return differentiated(KTOTrainer._compute_loss(trainer, policy, {**batch, "label": labels}, False), tokens)


def sft_weight_of(name: str) -> float:
    """The weight of the likelihood of the chosen that is tested: TRL's cpo_alpha, a mean over tokens."""
    return 0.6 if name == "cpo" else 0.0


def through_cpo_trainer(name: str, theirs: dict[str, Any], averaged: bool, tokens: Tokens) -> Found:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = SimpleNamespace(
        **{"alpha": 0.0, "beta": 0.7, "label_smoothing": 0.0, "simpo_gamma": 0.0, **theirs},
        accelerator=SimpleNamespace(device="cpu"),
    )
    logprobs = torch.stack([row.mean() if averaged else row.sum() for row in tokens.logprobs])
    losses, _, _ = CPOTrainer.cpo_loss(trainer, logprobs[::2], logprobs[1::2])
    return differentiated(losses.mean() - sft_weight_of(name) * torch.cat(tokens.logprobs[::2]).mean(), tokens)


def through_grpo_trainer(step: Step, options: dict[str, Any]) -> Outcome:
    """A step's loss and gradients as ``GRPOTrainer`` has them, of rollouts that all count, with the samples' own advantages."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    leaves = Leaves(step)
    rows = leaves.rows()
    now, entropy = padded([torch.stack(row.now) for row in rows]), padded([torch.stack(row.entropy) for row in rows])
    mask = padded([torch.ones(row.length, dtype=torch.int64) for row in rows])
    arguments = {
        "delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    }  # fmt: skip
    own = {
        "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0, "max_completion_length": 64,
    }  # fmt: skip
    assert options.keys() <= {*arguments, *own}
    same = lambda tensor, **_: tensor  # noqa: E731
    trainer = SimpleNamespace(
        **{**own, **{name: value for name, value in options.items() if name in own}},
        args=SimpleNamespace(**{**arguments, **{name: value for name, value in options.items() if name in arguments}}),
        _entropy_bonus_enabled=bool(options.get("entropy_coef")), use_adaptive_entropy=False, aux_loss_enabled=False, use_vllm=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=same, reduce=same, sync_gradients=True, pad_across_processes=same, device="cpu"
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given)
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor([row.advantage[0] for row in rows]), "num_items_in_batch": mask.sum(),
        "old_per_token_logps": padded([torch.tensor(row.before) for row in rows]),
        "sampling_per_token_logps": padded([torch.tensor(row.sampler) for row in rows]),
        "ref_per_token_logps": padded([torch.tensor(row.reference) for row in rows]),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return Outcome(constant(loss), leaves.gradients(loss))


CONTRASTIVE: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [  # Strop's name and options, TRL's options, averaged over tokens
    ("cpo", {"label_smoothing": 0.2}, {"loss_type": "sigmoid", "label_smoothing": 0.2}, False),
    ("cpo", {"loss_type": "hinge"}, {"loss_type": "hinge"}, False),
    ("cpo", {"loss_type": "ipo", "average_log_probs": True}, {"loss_type": "ipo"}, True),
    ("cpo", {"alpha": 0.1}, {"loss_type": "sigmoid", "alpha": 0.1}, False),
    ("simpo", {"gamma": 0.5, "label_smoothing": 0.1}, {"loss_type": "simpo", "simpo_gamma": 0.5, "label_smoothing": 0.1}, True),
    ("alphapo", {"gamma": 0.5, "alpha": 0.25}, {"loss_type": "simpo", "simpo_gamma": 0.5, "alpha": 0.25}, True),
    ("alphapo", {"gamma": 0.5, "alpha": -0.4}, {"loss_type": "simpo", "simpo_gamma": 0.5, "alpha": -0.4}, True),
]  # fmt: skip
