"""Training with Megatron Core on ranks gives the numbers of the torch learner in one process.

Three optimizer steps each, in `make test` two, then a measure and a score. In float64 what is left is Megatron Core's own float32: the norm
that gradients are clipped by: cases that are not clipped agree to 1e-15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.sampling import Sampling
from support.megatron_parity import MegatronCase, case, train_cases_on_rank
from support.needs import needs_megatron
from support.parity import FEW, MANY, Differences, compare, make_batch, shorter, train
from support.sweep import sweep

needs_megatron()
pytestmark = pytest.mark.slow

FLOAT64 = Differences(loss=3e-7, norm=3e-7, outputs=3e-7, weights=3e-8, metrics=3e-7)
NEAR_ZERO = replace(FLOAT64, loss=3e-6, metrics=1e-6)  # sums that cancel out: absolute differences of 2e-9
FLOAT32 = Differences(loss=2e-6, norm=2e-6, outputs=2e-6, weights=1e-6, metrics=1e-5)
THREE = replace(FLOAT32, norm=3e-6, outputs=3e-6, weights=3e-7)  # three steps in float32
CANCELLED = replace(THREE, loss=2e-4)  # ratios of sequences are near 1: the terms of the loss add up to 0, and 2e-7 is left
BFLOAT16 = Differences(loss=3e-2, norm=3e-2, outputs=3e-2, weights=1e-2, metrics=1.0)  # as between two cuts in one process

SINGLE: dict[str, Any] = {"dtype": torch.float32, "steps": 1}
BIASED: dict[str, Any] = {
    "family": "qwen2_padding",
    "no_decay": ("norm", "bias"),
}  # tied embeddings, and biases that Megatron does not decay
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tp": 2}),
    "tensor 2, sequence": (2, {"tp": 2, "sp": True}),
    "stages 2": (2, {"pp": 2}),
    "stages 2 x 2": (2, {"pp": 2, "vp": 2}),
    "context 2": (2, {"cp": 2}),
    "tensor 2, stages 2": (4, {"tp": 2, "sp": True, "pp": 2}),
    "tensor 2, stages 2 x 2": (4, {"tp": 2, "pp": 2, "vp": 2}),
    "context 2, tensor 2": (4, {"cp": 2, "tp": 2, "sp": True}),
    "context 2, stages 2": (4, {"cp": 2, "pp": 2}),
    "stages 2, data 2": (4, {"pp": 2}),
    "stages 4": (4, {"pp": 4}),
    "tensor 2, data 2": (4, {"tp": 2, "sp": True}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts 2": (2, {"ep": 2}),
    "experts 2, tensor 2": (2, {"ep": 2, "tp": 2, "sp": True}),
    "experts' tensor 2": (2, {"tp": 2, "sp": True, "etp": 2}),
    "experts 2, stages 2": (4, {"ep": 2, "pp": 2}),
    "experts 2, context 2": (2, {"ep": 2, "cp": 2}),
    "experts 2, data 4": (4, {"ep": 2}),
    "experts 2, tensor 2, data 2": (4, {"ep": 2, "tp": 2, "sp": True}),
    "experts 2 x 2, data 2": (4, {"ep": 2, "tp": 2, "sp": True, "etp": 2}),
    "experts 2, stages 2 x 2": (4, {"ep": 2, "pp": 2, "vp": 2}),
}
KEPT_CASES: dict[str, tuple[MegatronCase, Differences]] = {
    "data 2, few groups, tied": (MegatronCase(case=case(shapes=FEW, **BIASED), world=2), FLOAT64),
    "data 2, overlapped": (MegatronCase(case=case(**SINGLE), world=2, distributed=True, overlap=True), FLOAT32),
    "data 2, bfloat16": (
        MegatronCase(case=case(dtype=torch.bfloat16, steps=1, rate=1e-3), world=2, distributed=True),
        BFLOAT16,
    ),
    "tensor 2, dpo": (MegatronCase(case=case(algorithm="dpo"), world=2, sizes={"tp": 2}), FLOAT64),
    "tensor 2, sequence, tied": (MegatronCase(case=case(**BIASED), world=2, sizes={"tp": 2, "sp": True}), FLOAT64),
    "tensor 2, filters": (
        MegatronCase(case=case(sampling=Sampling(temperature=1.3, top_k=200, top_p=0.99)), world=2, sizes={"tp": 2}),
        FLOAT64,
    ),
    "tensor 2, sequence, critic": (MegatronCase(case=case(value=True), world=2, sizes={"tp": 2, "sp": True}), FLOAT64),
    "stages 2, tied, gspo": (MegatronCase(case=case(algorithm="gspo", **BIASED), world=2, sizes={"pp": 2}), FLOAT64),
    "stages 2 x 2, recomputed": (
        MegatronCase(
            case=case(family="llama_deep"), world=2, sizes={"pp": 2, "vp": 2}, options={"activation_checkpointing": True}
        ),
        FLOAT64,
    ),
    "context 2, window, branches": (
        MegatronCase(case=case(family="mistral", branches=True), world=2, sizes={"cp": 2}),
        FLOAT64,
    ),
    "context 3, ring, branches": (MegatronCase(case=case(branches=True), world=3, sizes={"cp": 3}), FLOAT64),
    "experts 2, tensor 2, frozen routers": (
        MegatronCase(case=case(family="qwen3_moe", frozen_routers=True), world=2, sizes={"ep": 2, "tp": 2, "sp": True}),
        FLOAT64,
    ),
    "tensor 2, stages 2, sft": (
        MegatronCase(case=case(algorithm="sft"), world=4, sizes={"tp": 2, "sp": True, "pp": 2}),
        FLOAT64,
    ),
}
MORE_CASES: dict[str, tuple[MegatronCase, Differences]] = {
    "context 2, tensor 2, distributed": (
        MegatronCase(case=case(**SINGLE), world=4, sizes={"cp": 2, "tp": 2, "sp": True}, distributed=True),
        FLOAT32,
    ),
}


def family_of(name: str, sizes: dict[str, Any]) -> str:
    deep = "vp" in sizes or sizes.get("pp") == 4
    return ("qwen3_moe_deep" if deep else "qwen3_moe") if name in EXPERTS else "llama_deep" if deep else "qwen3"


def _product() -> dict[str, tuple[MegatronCase, Differences]]:
    found: dict[str, tuple[MegatronCase, Differences]] = {}
    for name, (world, sizes) in {**LAYOUTS, **EXPERTS}.items():
        family = family_of(name, sizes)
        others = {
            "few groups": case(family=family, shapes=FEW),  # some ranks have no micro-batch of their own
            "critic": case(family=family, value=True),
            "reward model": case(family=family, value=True, algorithm="rm"),
            "distillation": case(family=family, algorithm="distillation"),
        }
        for other, trained in others.items():
            if not (trained.value and family.startswith("qwen3_moe")):
                bound = FLOAT64 if other in ("critic", "distillation") else NEAR_ZERO
                found[f"{name}, {other}"] = (MegatronCase(case=trained, world=world, sizes=sizes), bound)
        for other, shapes in {"overlapped": MANY, "few groups, overlapped": FEW}.items():  # what the configuration's defaults are
            trained = case(family=family, shapes=shapes, dtype=torch.float32, rate=1e-3)
            made = MegatronCase(case=trained, world=world, sizes=sizes, distributed=True, overlap=True)
            found[f"{name}, {other}"] = (made, THREE)
    for (name, (world, sizes)), algorithm, distributed in product(
        {**LAYOUTS, **EXPERTS}.items(), ("grpo", "gspo", "sft", "dpo"), (False, True)
    ):
        options: dict[str, Any] = {"dtype": torch.float32} if distributed else {}
        if distributed or algorithm == "gspo":
            options["rate"] = (
                1e-3  # with more, steps amplify rounding, and the third of GSPO clips every ratio: it has no gradient
            )
        trained = case(family=family_of(name, sizes), algorithm=algorithm, **options)
        made = MegatronCase(case=trained, world=world, sizes=sizes, distributed=distributed)
        found[f"{name}, {algorithm}{', distributed' if distributed else ''}"] = (
            made,
            FLOAT64 if not distributed else CANCELLED if algorithm == "gspo" else THREE,
        )
    return found


CASES = {**KEPT_CASES, **MORE_CASES, **_product()}


@cache
def train_together(names: tuple[str, ...]) -> Callable[[str], Differences]:
    """Train cases of as many ranks in one start of them."""
    chosen = {name: CASES[name][0] for name in names}
    if names[0] in KEPT_CASES:
        chosen = {name: replace(made, case=shorter(made.case)) for name, made in chosen.items()}
    cases = {name: (made, make_batch(made.case)) for name, made in chosen.items()}
    ranks = run_on_ranks(CASES[names[0]][0].world, train_cases_on_rank, cases)

    def differences(name: str) -> Differences:
        made, batch = cases[name]
        single = replace(train(made.case, batch), tied=[], adapters={})
        return compare([rank[name] for rank in ranks], single, len(batch.target))

    return differences


def companions(name: str) -> tuple[str, ...]:
    """The cases that share a start with a case: those kept for `make test`, or those of its layout."""
    made, kept = CASES[name][0], name in KEPT_CASES
    together = [other for other, (case, _) in CASES.items() if case.world == made.world and (other in KEPT_CASES) == kept]
    return tuple(other for other in together if kept or CASES[other][0].sizes == made.sizes)


@pytest.mark.parametrize("name", sweep(CASES, *KEPT_CASES))
def test_megatron_core_gives_the_numbers_of_the_torch_learner(name: str) -> None:
    _, bound = CASES[name]
    found = train_together(companions(name))(name)
    for part in ("loss", "norm", "outputs", "weights", "metrics"):
        assert getattr(found, part) <= getattr(bound, part), (part, found)
