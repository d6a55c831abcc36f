"""What a Megatron Core learner does besides the mathematics of a step: layouts side by side, offload, schedules, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop import metrics
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import MegatronOptimizerConfig, MegatronSchedulerConfig
from strop.extensions.megatron.megatron_dims import MegatronDims
from strop.learner.parallel.micro_batch import assemble_outputs
from strop.types import Batch
from support.megatron_parity import MegatronCase, case, make_megatron_learner, make_network
from support.needs import needs_megatron
from support.parity import SAMPLING, build_network, get_loss, make_batch

needs_megatron()
pytestmark = pytest.mark.slow
dist: Any = torch.distributed

POLICY = MegatronCase(case=case(), world=2, sizes={"tp": 2, "sp": True})
SINGLE = MegatronCase(case=case(dtype=torch.float32), world=2, distributed=True)
EXPERTS = case(family="qwen3_moe", shapes=((5, (3,)), (5, (3,)), (5, (3,)), (5, (3,))))


def _train(learner: Any, batch: Batch, loss: Any, steps: int = 1) -> list[dict[str, float]]:
    taken = []
    for _ in range(steps):
        learner.forward_backward_local(batch, loss)
        taken.append(metrics.to_floats(learner.step()))
    return taken


def _weights(learner: Any) -> list[torch.Tensor]:
    learner.network.gather_weights()
    return [parameter.detach().clone() for _, parameter in learner.network.named_parameters()]


def score_in_other_layout(batch: Batch) -> dict[str, Any]:
    """A policy and a reference of other sizes, in turn."""
    learner = make_megatron_learner(POLICY)
    other = MegatronCase(case=case(), world=2, sizes={"pp": 2})
    from strop.extensions.megatron.megatron_network import MegatronScorer

    network = make_network(other, MegatronLayout(MegatronDims.from_config(other.config(), 2), "cpu"))
    scorer = MegatronScorer(network, SAMPLING, 50)
    found = [learner.score_local(batch), scorer.score_local(batch), learner.score_local(batch)]
    _train(learner, batch, get_loss(POLICY.case))
    found.append(scorer.score_local(batch))
    return {"scores": found, "leads": (learner.layout.is_leader, network.layout.is_leader)}


def train_with_offload(batch: Batch) -> dict[str, Any]:
    """Three steps of two learners, one of which leaves its device and comes back around each."""
    here, away = make_megatron_learner(SINGLE), make_megatron_learner(SINGLE)
    loss, moved = get_loss(SINGLE.case), []
    norms: list[list[dict[str, float]]] = [[], []]
    for _ in range(3):
        norms[0] += _train(here, batch, loss)
        before = away.network.chunks[0].buffers[0].grad_data.data_ptr()
        for part in (away.state_offload, away.weight_offload):
            part.offload()
        moved.append(away.network.chunks[0].buffers[0].grad_data.data_ptr() != before)
        for part in (away.state_offload, away.weight_offload):
            part.onload()
        norms[1] += _train(away, batch, loss)
    same = all(torch.equal(left, right) for left, right in zip(_weights(here), _weights(away), strict=True))
    return {"norms": norms, "moved": moved, "same": same}


def skip_and_accumulate(batch: Batch) -> dict[str, Any]:
    """A gradient that is not finite, a batch without signal, and two passes in a step."""
    learner = make_megatron_learner(POLICY)
    loss = get_loss(POLICY.case)

    def broken(outputs: Any, part: Batch) -> Any:
        value, logged = loss(outputs, part)
        return value * float("nan"), logged

    before = _weights(learner)
    skipped = _train(learner, batch, broken)[0]
    unchanged = all(torch.equal(left, right) for left, right in zip(before, _weights(learner), strict=True))
    silent = _train(learner, replace(batch, zero_gradient=torch.ones(batch.num_sequences, dtype=torch.bool)), loss)[0]
    fresh = [make_megatron_learner(POLICY) for _ in range(2)]
    fresh[0].forward_backward_local(batch, loss)
    norms = [_train(each, batch, loss)[0]["grad_norm"] for each in fresh]
    return {"skipped": skipped, "unchanged": unchanged, "silent": silent, "norms": norms}


ONE_BROKEN: dict[str, MegatronCase] = {
    "stages 2 x 2": MegatronCase(case=case(family="llama_deep"), world=2, sizes={"pp": 2, "vp": 2}),
    "distributed, overlapped": replace(SINGLE, overlap=True),
    "experts 2": MegatronCase(case=case(family="qwen3_moe", dtype=torch.float32), world=2, sizes={"ep": 2}, distributed=True),
}


def skip_for_one_micro_batch(batch: Batch) -> dict[str, Any]:
    """A gradient that is not finite in one micro-batch of one rank, and a step after it."""
    found = {}
    for name, made in ONE_BROKEN.items():
        loss, broken = get_loss(made.case), [True]
        learner, fresh = make_megatron_learner(made), make_megatron_learner(made)

        def break_once(outputs: Any, part: Batch, loss: Any = loss, broken: list[bool] = broken, learner: Any = learner) -> Any:
            value, logged = loss(outputs, part)
            return value * (float("inf") if learner.layout.data_rank == 0 and broken and broken.pop() else 1.0), logged

        skipped = _train(learner, batch, break_once)[0]["steps_skipped_for_nonfinite_gradient"]
        taken, alone = _train(learner, batch, loss)[0], _train(fresh, batch, loss)[0]
        same = all(torch.equal(left, right) for left, right in zip(_weights(learner), _weights(fresh), strict=True))
        found[name] = (skipped, taken == alone, same)
    return found


def follow_schedule(batch: Batch) -> dict[str, Any]:
    """The learning rates of a schedule that advances once for two optimizer steps."""
    schedule = MegatronSchedulerConfig(
        lr_decay_style="linear",
        lr_decay_iters=None,
        lr_warmup_iters=2,
        lr_warmup_init=0.002,
        start_weight_decay=0.1,
        end_weight_decay=0.1,
    )
    made = MegatronCase(case=case(), world=2, schedule=schedule)
    learner = make_megatron_learner(made, total_steps=12, steps_per_batch=2)
    silent = replace(batch, zero_gradient=torch.ones(batch.num_sequences, dtype=torch.bool))
    steps = _train(learner, silent, get_loss(made.case), 14)
    return {"rates": [step["lr"] for step in steps]}


def balance_experts(_: Batch) -> dict[str, Any]:
    """Gradient norms with the losses of routers, in one micro-batch a rank and in several."""
    batch = make_batch(EXPERTS)
    norms = {}
    for name, options in {
        "none": {},
        "z": {"moe_z_loss_coeff": 0.5},
        "aux": {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"},
    }.items():
        for tokens in (8, 1000):
            made = MegatronCase(case=replace(EXPERTS, train_tokens=tokens), world=2, options=options)
            norms[name, tokens] = _train(make_megatron_learner(made), batch, get_loss(EXPERTS))[0]["grad_norm"]
    return {"norms": norms}


def refuse(batch: Batch) -> dict[str, Any]:
    """The errors of what cannot work."""
    from strop.extensions.megatron.megatron_optimizer import make_megatron_optimizer, wrap_stages

    def message(call: Callable[[], Any]) -> str:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        return str(raised.value)

    overlapped = make_megatron_learner(replace(SINGLE, overlap=True))
    loss = get_loss(SINGLE.case)
    overlapped.forward_backward_local(batch, loss)
    chunks, ddp = overlapped.network.chunks, overlapped.config.megatron_cfg.distributed_data_parallel_config
    offloaded = MegatronOptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    return {
        "overlap_grad_reduce": message(lambda: overlapped.forward_backward_local(batch, loss)),
        "use_custom_fsdp": message(lambda: wrap_stages([], replace(ddp, use_custom_fsdp=True), distributed_optimizer=True)),
        "optimizer_cpu_offload": message(lambda: make_megatron_optimizer(offloaded, chunks, torch.float32)),
        "use_distributed_optimizer": message(lambda: make_megatron_learner(MegatronCase(case=case(), world=2, distributed=True))),
        "gradient_accumulation_fusion": message(
            lambda: make_megatron_learner(replace(SINGLE, options={"gradient_accumulation_fusion": True}))
        ),
        "lr_decay_iters": message(
            lambda: make_megatron_learner(
                replace(SINGLE, schedule=MegatronSchedulerConfig(lr_decay_style="cosine", lr_decay_iters=None))
            )
        ),
        "needs 3 ranks": message(lambda: MegatronLayout(MegatronDims(data=3), "cpu")),
    }


TASKS = (
    score_in_other_layout,
    train_with_offload,
    skip_and_accumulate,
    skip_for_one_micro_batch,
    follow_schedule,
    balance_experts,
    refuse,
)


def work_on_rank(rank: int, batch: Batch) -> dict[str, dict[str, Any]]:
    return {task.__name__: task(batch) for task in TASKS}


@cache
def results() -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(2, work_on_rank, make_batch(POLICY.case))


@pytest.mark.exhaustive
def test_layouts_of_different_sizes_stand_side_by_side() -> None:
    ranks = [each["score_in_other_layout"] for each in results()]
    assert [each["leads"] for each in ranks] == [(True, False), (False, True)]
    batch = make_batch(POLICY.case)
    wanted: Any = build_network(POLICY.case).outputs(batch, SAMPLING)
    for answers in zip(*(each["scores"] for each in ranks), strict=True):
        found: Any = assemble_outputs(answers, len(batch.target))
        torch.testing.assert_close(found.logprobs, wanted.logprobs.detach().float(), rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_a_learner_that_was_offloaded_goes_on_as_if_it_had_not_been() -> None:
    for found in (each["train_with_offload"] for each in results()):
        assert found["norms"][0] == found["norms"][1]
        assert found["moved"] == [True] * 3
        assert found["same"]


def test_a_step_whose_gradient_is_not_finite_is_skipped() -> None:
    for found in (each["skip_and_accumulate"] for each in results()):
        assert found["skipped"]["steps_skipped_for_nonfinite_gradient"] == 1
        assert found["unchanged"]


def test_all_ranks_skip_a_step_for_one_micro_batch_and_go_on_as_if_it_had_not_been() -> None:
    for found in (each["skip_for_one_micro_batch"] for each in results()):
        assert found == dict.fromkeys(ONE_BROKEN, (1.0, True, True))


def test_gradients_accumulate_until_the_step_and_a_batch_without_signal_has_none() -> None:
    for found in (each["skip_and_accumulate"] for each in results()):
        assert found["silent"]["grad_norm"] == 0
        assert found["norms"][0] == pytest.approx(2 * found["norms"][1], rel=1e-6)


def test_the_schedule_counts_batches_and_ends_with_the_run() -> None:
    by_batch = [0.002, 0.006, 0.01, 0.0075, 0.005, 0.0025, 0.0]  # 12 optimizer steps are 6 batches
    for found in (each["follow_schedule"] for each in results()):
        assert found["rates"] == pytest.approx([rate for rate in by_batch for _ in range(2)], abs=1e-12)


def test_losses_of_routers_do_not_depend_on_the_number_of_micro_batches() -> None:
    norms = results()[0]["balance_experts"]["norms"]
    assert norms["z", 8] == pytest.approx(norms["z", 1000], rel=1e-6)
    assert norms["none", 8] == pytest.approx(norms["none", 1000], rel=1e-6)
    assert abs(norms["z", 8] / norms["none", 8] - 1) > 1e-3
    assert abs(norms["aux", 8] / norms["none", 8] - 1) > 1e-4


@pytest.mark.parametrize(
    "key",
    (
        "overlap_grad_reduce",
        "use_custom_fsdp",
        "optimizer_cpu_offload",
        "use_distributed_optimizer",
        "gradient_accumulation_fusion",
        "lr_decay_iters",
        "needs 3 ranks",
    ),
)
def test_what_cannot_work_is_refused_with_its_key(key: str) -> None:
    assert key in results()[0]["refuse"][key]
