"""Strop, configured by NeMo-RL's keys, against definitions in its style: padded tensors [B, T] and masks, written for this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from conformance.cases import PAIRS, STEPS, Step
from conformance.formulas_common import constant
from conformance.harness import Leaves, Outcome, through_strop
from conformance.test_flat_keys import IMPORTANCE, PENALTY, TRUNCATED, KeyCase, by_keys
from numerics.sections import FLOAT_BOUNDS, FLOATS, Row, Section, over_steps

USUAL = [STEPS[name] for name in ("random", "very unequal lengths", "single tokens", "one-sided groups", "on policy")]
MARGINS = [PAIRS[name] for name in ("random pairs", "margins", "very unequal lengths")]
PEER = "NeMo-RL's definition"


@dataclass(frozen=True)
class Padded:
    """A step as tensors [B, T] and rewards [B]."""

    step: Step
    now: Tensor
    before: Tensor
    sampler: Tensor
    reference: Tensor
    mask: Tensor

    @property
    def rewards(self) -> Tensor:  # [B]
        return torch.tensor([sample.reward for sample in self.step.samples], dtype=torch.float64)


def pad(step: Step, leaves: Leaves) -> Padded:
    rows = leaves.rows(filtered=False)
    columns = [torch.stack(row.now) for row in rows]
    fill = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    older = [fill([torch.tensor(getattr(row, name)) for row in rows]) for name in ("before", "sampler", "reference")]
    return Padded(step, fill(columns), *older, fill([torch.ones(row.length) for row in rows]))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def sequence_level(values: Tensor, mask: Tensor) -> Tensor:
    return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


# ---- advantages


def group_credit(
    batch: Padded, *, normalize: bool = True, leave_one_out: bool = False, baseline: bool = True, bessel: bool = False
) -> Tensor:
    """(reward - baseline) / (deviation + 1e-6) in its group, not divided where the group does not vary, [B, 1]."""
    credit, start = [], 0
    for group in batch.step.groups:
        rewards = batch.rewards[start : (start := start + len(group))]
        mean = (rewards.sum() - rewards) / (len(rewards) - 1) if leave_one_out else rewards.mean()
        centred = rewards - mean if baseline else rewards
        varies = float(rewards.max() - rewards.min()) > 1e-9
        credit.append(centred / (rewards.std(correction=int(bessel)) + 1e-6) if normalize and varies else centred)
    return torch.cat(credit)[:, None].float().to(batch.now.dtype)


# ---- losses


def surrogate(batch: Padded, advantages: Tensor, *, low: float = 0.2, high: float = 0.2, c: float | None = None, sequence: bool = False,
    on_policy: bool = False, ratio: bool = True) -> Tensor:  # fmt: skip
    """-min(rA, clip(r)A) of each token; with c bounded where A < 0; with one geometric ratio for a sequence; or REINFORCE's."""
    if not ratio:
        return -advantages * batch.now
    log_ratio = (batch.now - (batch.now.detach() if on_policy else batch.before)) * batch.mask
    if sequence:
        log_ratio = (log_ratio.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    ratios = log_ratio.exp()
    loss = torch.max(-ratios * advantages, -ratios.clamp(1 - low, 1 + high) * advantages)
    return loss if c is None else torch.where(advantages < 0, torch.min(loss, -c * advantages), loss)


def sampler_weights(
    batch: Padded, *, kind: str = "", low: float = 0.0, high: float = float("inf"), sequence: bool = False
) -> Tensor:
    """exp(log pi_old - log mu) of each token, or of a sequence; truncated (tis), kept within the range (icepop), or kept where the
    geometric mean of the sequence is within it (seq-mask-tis)."""
    log_weight = (batch.before - batch.sampler) * batch.mask
    weight = (log_weight.sum(-1, keepdim=True).expand_as(log_weight) if sequence else log_weight).exp()
    if kind == "tis":
        return weight.clamp(low, high)
    if kind == "icepop":
        return torch.where((weight >= low) & (weight <= high), weight, 0.0)
    if kind == "seq-mask-tis":
        geometric = (log_weight.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        return weight * ((geometric >= low) & (geometric <= high))
    return weight


def kl_penalty(
    batch: Padded, kind: str = "k3", *, inside: float | None = 20.0, outside: float | None = 10.0, weighted_by: str = ""
) -> Tensor:
    """An estimate between bounds, times the ratio to the sampler, or times a ratio of 1 that has the gradient of sampling."""
    log_ratio = batch.reference - batch.now
    if inside is not None:
        log_ratio = log_ratio.clamp(-inside, inside)
    estimate = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": torch.expm1(log_ratio) - log_ratio}[kind]
    if weighted_by:
        estimate = estimate * (batch.now - (batch.sampler if weighted_by == "sampler" else batch.now.detach())).exp()
    return estimate if outside is None else estimate.clamp(-outside, outside)


Loss = Callable[[Padded], Tensor]


def clipped(**options: object) -> Loss:
    return lambda batch: masked_mean(surrogate(batch, group_credit(batch), **options), batch.mask)  # type: ignore[arg-type]


def corrected(**options: object) -> Loss:
    return lambda batch: masked_mean(sampler_weights(batch, **options) * surrogate(batch, group_credit(batch)), batch.mask)  # type: ignore[arg-type]


def penalised(**options: object) -> Loss:
    return lambda batch: clipped()(batch) + 0.1 * masked_mean(kl_penalty(batch, **options), batch.mask)  # type: ignore[arg-type]


def credited(**options: bool) -> Loss:
    return lambda batch: masked_mean(surrogate(batch, group_credit(batch, **options)), batch.mask)


def gspo(batch: Padded) -> Tensor:
    return sequence_level(surrogate(batch, group_credit(batch), low=3e-4, high=4e-4, sequence=True), batch.mask)


def gspo_corrected(batch: Padded) -> Tensor:
    ratios = surrogate(batch, group_credit(batch), low=3e-4, high=4e-4, sequence=True)
    return sequence_level(sampler_weights(batch, sequence=True) * ratios, batch.mask)


def positive_nll(batch: Padded) -> Tensor:
    positive = batch.mask * (batch.rewards > 0)[:, None]
    return clipped()(batch) + 0.3 * masked_mean(-batch.now, positive)


def cispo(batch: Padded) -> Tensor:
    ratio = (batch.now - batch.before).exp().detach()
    return masked_mean(-ratio.clamp(0.0, 1.3) * group_credit(batch) * batch.now, batch.mask)


# ---- preferences


def preference(batch: Padded, *, beta: float = 0.05, averaged: bool = False, weight: float = 1.0, sft: float = 0.0,
    sft_averaged: bool = True) -> Tensor:  # fmt: skip
    """Of pairs in neighbouring rows, chosen first."""
    lengths = batch.mask.sum(-1)
    rewards = ((batch.now - batch.reference) * batch.mask).sum(-1) / (lengths if averaged else 1)
    loss = -torch.nn.functional.logsigmoid(beta * (rewards[::2] - rewards[1::2])).mean()
    chosen = (-batch.now * batch.mask).sum(-1) / (lengths if sft_averaged else 1)
    return weight * loss + sft * chosen[::2].mean()


GSPO = (
    "loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false loss_fn.ratio_clip_min=0.0003 "
    "loss_fn.ratio_clip_max=0.0004"
)
CASES: list[tuple[str, Loss]] = [
    ("", clipped()),
    (PENALTY, penalised()),
    (f"{PENALTY} loss_fn.reference_policy_kl_type=k1", penalised(kind="k1")),
    (f"{PENALTY} loss_fn.reference_policy_kl_type=k2", penalised(kind="k2")),
    (f"{PENALTY} loss_fn.kl_input_clamp_value=0.3", penalised(inside=0.3)),
    (f"{PENALTY} loss_fn.kl_output_clamp_value=0.05", penalised(outside=0.05)),
    (f"{PENALTY} loss_fn.use_on_policy_kl_approximation=true", penalised(weighted_by="sampler")),
    (f"{PENALTY} loss_fn.use_on_policy_kl_approximation=false", penalised(weighted_by="itself")),
    ("loss_fn.ratio_clip_min=0.1", clipped(low=0.1)),
    ("loss_fn.ratio_clip_max=0.4", clipped(high=0.4)),
    ("loss_fn.ratio_clip_c=1.5", clipped(c=1.5)),
    ("loss_fn.token_level_loss=false", lambda batch: sequence_level(surrogate(batch, group_credit(batch)), batch.mask)),
    ("loss_fn.force_on_policy_ratio=true", clipped(on_policy=True)),
    (GSPO, gspo),
    ("loss_fn.use_cispo=true loss_fn.ratio_clip_max=0.3", cispo),
    ("loss_fn.disable_ppo_ratio=true", clipped(ratio=False)),
    ("loss_fn.positive_example_nll_weight=0.3", positive_nll),
    (IMPORTANCE, corrected()),
    (f"{TRUNCATED}=tis loss_fn.truncated_importance_sampling_ratio=1.1", corrected(kind="tis", high=1.1)),
    (
        f"{TRUNCATED}=tis loss_fn.truncated_importance_sampling_ratio=1.1 loss_fn.truncated_importance_sampling_ratio_min=0.9",
        corrected(kind="tis", low=0.9, high=1.1),
    ),
    (
        f"{TRUNCATED}=icepop loss_fn.truncated_importance_sampling_ratio=1.4 loss_fn.truncated_importance_sampling_ratio_min=0.7",
        corrected(kind="icepop", low=0.7, high=1.4),
    ),
    (
        f"{TRUNCATED}=seq-mask-tis loss_fn.truncated_importance_sampling_ratio=1.2 "
        "loss_fn.truncated_importance_sampling_ratio_min=0.8",
        corrected(kind="seq-mask-tis", low=0.8, high=1.2),
    ),
    (f"{IMPORTANCE} {GSPO}", gspo_corrected),
    ("grpo.normalize_rewards=false", credited(normalize=False)),
    ("grpo.use_leave_one_out_baseline=true", credited(leave_one_out=True)),
    ("grpo.minus_baseline=false", credited(baseline=False)),
    ("grpo.adv_estimator.deviation=unbiased", credited(bessel=True)),
]
PREFERENCES: list[tuple[str, Loss]] = [
    ("dpo.reference_policy_kl_penalty=0.3", partial(preference, beta=0.3)),
    ("dpo.preference_average_log_probs=true", partial(preference, averaged=True)),
    ("dpo.preference_loss_weight=2 dpo.sft_loss_weight=0.5", partial(preference, weight=2.0, sft=0.5)),
    ("dpo.preference_loss_weight=0 dpo.sft_loss_weight=1", partial(preference, weight=0.0, sft=1.0)),
    ("dpo.sft_loss_weight=0.5 dpo.sft_average_log_probs=false", partial(preference, sft=0.5, sft_averaged=False)),
]


def through_definition(loss: Loss, step: Step) -> Outcome:
    leaves = Leaves(step)
    value = loss(pad(step, leaves))
    return Outcome(constant(value), leaves.gradients(value))


def rows() -> Iterator[Row]:
    for kind, cases, steps in (("grpo", CASES, USUAL), ("dpo", PREFERENCES, MARGINS)):
        for keys, loss in cases:
            subject = partial(by_keys, KeyCase(kind, keys))
            yield Row(
                keys.replace("loss_fn.", "") or "defaults",
                PEER,
                partial(
                    over_steps,
                    lambda step, subject=subject: through_strop(subject(), step),
                    partial(through_definition, loss),
                    steps,
                ),
            )


def nemo_rl() -> Section:
    return Section(
        "NeMo-RL's keys",
        "`strop grpo` and `strop dpo`, configured by NeMo-RL's keys, from rewards to gradient, compared with vectorised "
        "definitions in NeMo-RL's style, written for this page. `benchmarks/nemo_rl_code.py` compares with NeMo-RL's own code "
        "in a checkout.",
        FLOATS,
        (1e-6, 1e-6, *FLOAT_BOUNDS[2:]),
        tuple(rows()),
    )
