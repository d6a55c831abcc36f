"""What a learner on many ranks says, refuses and leaves behind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import nn

from strop import metrics
from strop.algorithms.base import CANDIDATES
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs, assemble_result
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.rank_zero_loading import is_meta_model, load_on_rank_zero, probe_on_rank_zero
from strop.learner.parallel.sharded import check_parallelizable, parallelize_network
from strop.learner.torch.scorer import offload
from strop.models.layers.known_code import decoder_layers
from strop.models.network import Network
from strop.sampling import KEPT_TOKENS, Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.models import VOCABULARY, build
from support.parity import Case, build_network, frozen_scores, get_loss, make_batch

pytestmark = pytest.mark.slow

CASE = Case(sizes=ParallelDims(shard=2), family="qwen2")
ROUNDED = replace(CASE, dtype=torch.float32, weights_dtype=torch.bfloat16, precision=torch.bfloat16)


def with_sets(batch: Batch) -> Batch:
    """Every token with other ones that are asked for too, and those it was drawn from."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(4, VOCABULARY, (len(batch.target), 3), generator=generator)
    return batch.with_columns({CANDIDATES: drawn, KEPT_TOKENS: torch.cat([batch.target[:, None], drawn[:, 1:]], dim=1).int()})


def without_signal(batch: Batch) -> Batch:
    return replace(batch, zero_gradient=torch.ones(batch.num_sequences, dtype=torch.bool))


def everything(rank: int, batch: Batch) -> dict[str, Any]:
    meshes = DeviceMeshes(CASE.sizes, "cpu")
    return {
        "frozen": frozen_scores(CASE, batch, meshes),
        "frozen, bfloat16": frozen_scores(ROUNDED, batch, meshes),
        "sets": frozen_scores(CASE, with_sets(batch), DeviceMeshes(ParallelDims(context=2), "cpu")),
        "loading": loading(rank),
        **learning(rank, batch, meshes),
    }


def loading(rank: int) -> dict[str, Any]:
    model = load_on_rank_zero(lambda: build("llama").requires_grad_(False))
    network = probe_on_rank_zero(model, Network)
    said = message(lambda: load_on_rank_zero(no_model))
    return {
        "shell": is_meta_model(model),
        "packed": network.packed,
        "trained": any(p.requires_grad for p in model.parameters()),
        "said": said,
    }


def no_model() -> Any:
    raise FileNotFoundError("there is no such model")


def learning(rank: int, batch: Batch, meshes: DeviceMeshes) -> dict[str, Any]:
    network = build_network(CASE)
    low = build_network(replace(CASE, dtype=torch.bfloat16))
    found: dict[str, Any] = {"low": message(lambda: parallelize_network(low, meshes))}
    placement = parallelize_network(network, meshes)
    found["optimizer"] = message(
        lambda: make_torch_learner(network, CASE.sampling, placement, optimizer="torch.optim.LBFGS", optimizer_kwargs={})
    )
    learner = make_torch_learner(network, CASE.sampling, placement, optimizer_kwargs={"lr": 1e-2}, train_tokens=40)
    found["alone"] = message(lambda: learner.score(batch))
    found["offload"] = message(lambda: offload(network))

    def broken(outputs: Any, part: Batch) -> Any:
        """Not finite where rank 0 alone computes."""
        return outputs.logprobs.sum() * (float("inf") if rank == 0 else 1.0), {}

    learner.forward_backward_local(without_signal(batch), get_loss(CASE))
    found["zero"] = [float(parameter.grad.abs().max()) for parameter in learner.parameters if parameter.grad is not None]
    found["idle"] = metrics.to_floats(learner.step())["grad_norm"]
    before = [parameter.detach().clone() for parameter in learner.parameters]
    learner.forward_backward_local(batch, broken)
    found["skipped"] = metrics.to_floats(learner.step())["steps_skipped_for_nonfinite_gradient"]
    found["kept"] = all(torch.equal(old, new) for old, new in zip(before, learner.parameters, strict=True))
    learner.forward_backward_local(batch, get_loss(CASE))
    learner.step()
    weights = list(learner.weights())
    found["weights"] = dict(weights)
    found["tensors"] = len({id(tensor) for _, tensor in weights})
    found["rows"] = sum(parameter.numel() for parameter in learner.parameters)
    found["same memory"] = all(
        placement.local_parameters[name].untyped_storage().data_ptr() == piece.to_local().untyped_storage().data_ptr()
        for name, piece in placement.sharded.items()
    )
    return found


def message(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def found() -> tuple[Batch, list[dict[str, Any]]]:
    batch = make_batch(CASE)
    return batch, run_on_ranks(2, everything, batch)


@pytest.mark.parametrize(("name", "case"), [("frozen", CASE), ("frozen, bfloat16", ROUNDED)])
def test_a_frozen_network_on_many_ranks_scores_as_in_one_process(name: str, case: Case) -> None:
    batch, ranks = found()
    if case.weights_dtype is not None:
        case = replace(case, weights_dtype=None)
        network = build_network(case)
        network.model.to(torch.bfloat16)
        with torch.no_grad():
            wanted: Any = network.outputs(batch, case.sampling)
    else:
        wanted = assemble_outputs([frozen_scores(case, batch, None)], len(batch.target))
    scores: Any = assemble_outputs([rank[name] for rank in ranks], len(batch.target))
    assert torch.allclose(scores.logprobs, wanted.logprobs.float(), atol=1e-6 if name == "frozen" else 0.05)


def test_ranks_that_share_a_micro_batch_share_out_every_column_of_it() -> None:
    batch, ranks = found()
    scores: Any = assemble_outputs([rank["sets"] for rank in ranks], len(batch.target))
    wanted: Any = assemble_outputs([frozen_scores(CASE, with_sets(batch), None)], len(batch.target))
    for name in ("logprobs", "entropy", "candidates"):
        assert torch.allclose(getattr(scores, name), getattr(wanted, name), atol=1e-6), name
    assert wanted.candidates.isinf().any() and not wanted.candidates.isinf().all()


def test_a_batch_without_signal_still_steps_the_optimizer_of_every_rank() -> None:
    for rank in found()[1]:
        assert rank["idle"] == 0 and len(rank["zero"]) > 0 and max(rank["zero"]) == 0


def test_the_first_rank_alone_loads_a_model() -> None:
    _, (first, second) = found()
    assert not first["loading"]["shell"] and second["loading"]["shell"]
    assert first["loading"]["packed"] and second["loading"]["packed"]
    assert not first["loading"]["trained"] and not second["loading"]["trained"]
    assert first["loading"]["said"] == second["loading"]["said"] == "FileNotFoundError: there is no such model"


def test_answers_of_one_rank_are_not_taken_for_those_of_all() -> None:
    batch, ranks = found()
    for rank in ranks:
        assert f"of the batch's {len(batch.target)} predicted tokens" in rank["alone"]
        assert "a sharded network cannot be moved between uses; shard it with cpu_offload" in rank["offload"]
    with pytest.raises(ValueError, match="the outputs cover 0 of the batch's 3"):
        assemble_result([MicroBatchOutputs()], 3)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    for rank in found()[1]:
        assert rank["skipped"] == 1 and rank["kept"]


def test_each_rank_steps_its_own_pieces_in_the_memory_they_are_gathered_from() -> None:
    _, ranks = found()
    whole = sum(parameter.numel() for parameter in build_network(CASE).model.parameters())
    assert sum(rank["rows"] for rank in ranks) == whole
    assert all(rank["same memory"] for rank in ranks)


def test_every_rank_has_all_weights_and_tied_ones_are_one_tensor() -> None:
    _, (first, second) = found()
    assert first["weights"].keys() == second["weights"].keys() == build_network(CASE).model.state_dict().keys()
    assert first["tensors"] == len(first["weights"]) - 1
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name])


def test_an_optimizer_that_must_see_whole_weights_is_refused() -> None:
    for rank in found()[1]:
        assert "LBFGS is not known to be elementwise" in rank["optimizer"]


def test_trained_weights_of_low_precision_are_refused_unless_it_is_asked_for() -> None:
    assert "pass that dtype as weights_dtype" in found()[1][0]["low"]


def test_padded_rows_are_not_divided_among_ranks() -> None:
    network = Network(build("llama"), packed=False)
    for sizes in (ParallelDims(context=2), ParallelDims(tensor=2), ParallelDims(shard=2, expert=2)):
        with pytest.raises(ValueError, match="reads padded rows"):
            check_parallelizable(network, sizes)
    check_parallelizable(network, ParallelDims(replicate=2, shard=2))


def test_any_number_of_context_ranks_divides_packed_rows() -> None:
    check_parallelizable(Network(build("llama"), packed=True), ParallelDims(context=3))  # 4 heads: a ring


@pytest.mark.parametrize("family", ["llama", "gpt2", "recurrent_gemma", "qwen3_moe"])
def test_the_layers_of_a_decoder_are_found(family: str) -> None:
    model = build(family)
    layers = decoder_layers(model.get_decoder())
    assert len(layers) == 2 and len({type(layer) for layer in layers}) == 1
    assert not any(isinstance(layer, nn.Linear) for layer in layers)


def test_a_learner_without_a_placement_is_on_one_device() -> None:
    learner = make_torch_learner(Network(build("llama")), Sampling())
    assert learner.parallelism.is_leader and len(learner.parallelism.trainable_parameters()) == len(learner.parameters)
