"""The embedded engine in emulated low precision: it computes with the rounded weights, inputs and keys."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from strop.generation.quantized_rollouts import EmulatedQuantization
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_runner
from strop.models.network import Network
from strop.models.quantization.number_format import NUMBER_FORMATS
from strop.models.quantization.quantization_plan import INPUT_FORMATS, QuantizationPlan, make_plan
from strop.sampling import Sampling
from support.models import build
from support.sweep import one_in
from support.torch_engine import Request, make_engine, run_requests

PROMPT = [5, 40, 200, 31, 7, 7, 90, 301, 12, 66, 45]
SAMPLING = Sampling(max_new_tokens=10)


def sample(model: Any, plan: QuantizationPlan | None, precision: torch.dtype = torch.float32, **options: Any) -> Any:
    network = Network(model, packed=True, precision=precision)
    emulated = None if plan is None else EmulatedQuantization(plan, rounds_weights=True)
    config = TorchGenerationConfig(kv_cache_memory_gb=0.01, max_num_seqs=4, **options)
    runner = make_runner(network, config, length=48, quantization=emulated)
    return run_requests(make_engine(runner), [Request(PROMPT, SAMPLING, seed=3)])[0]


def rounded_copy(model: Any, plan: QuantizationPlan) -> Any:
    """A model with rounded weights, whose linear layers round their inputs: the definition, without the engine."""
    twin = copy.deepcopy(model)
    selected = plan.select(name for name, _ in twin.named_parameters())
    with torch.no_grad():
        for name in selected:
            twin.get_parameter(name).copy_(plan.round_weight(twin.get_parameter(name)))
    for name, module in twin.named_modules():
        if f"{name}.weight" in selected:
            module.register_forward_pre_hook(lambda _, inputs: (plan.round_input(inputs[0]),))
    return twin


def logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    row = torch.cat([torch.tensor(PROMPT), tokens])
    model.set_attn_implementation("eager")  # the engine has left its own
    with torch.no_grad():
        logits = model(row[None]).logits[0, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", one_in(2, INPUT_FORMATS))
@pytest.mark.parametrize("paged", [True, False])
def test_log_probabilities_are_those_of_the_rounded_model(name: str, paged: bool) -> None:
    model, plan = build("llama"), make_plan(NUMBER_FORMATS[name])
    completion = sample(model, plan, paged_cache=paged)
    own = logprobs(rounded_copy(model, plan), completion.tokens)
    unrounded = logprobs(model, completion.tokens)
    # An input on the border of two values of the format may fall on the other side by the order of a sum.
    bound = 1e-4 if plan.inputs is None else 5e-3
    assert (own - completion.logprobs).abs().mean() < bound
    assert (own - completion.logprobs).abs().mean() < 0.2 * (unrounded - completion.logprobs).abs().mean()


def test_a_publish_rounds_the_new_weights_and_leaves_the_learners_as_they_are() -> None:
    model, plan = build("llama"), make_plan(NUMBER_FORMATS["nvfp4"])
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    first = sample(model, plan)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    second = sample(model, plan)
    assert (logprobs(rounded_copy(model, plan), second.tokens) - second.logprobs).abs().max() < 1e-4
    assert first.logprobs.tolist() != second.logprobs.tolist()


def test_layers_that_are_left_out_are_not_rounded() -> None:
    model = build("llama")
    plan = make_plan(NUMBER_FORMATS["fp8_block"], ignored=("proj",))
    assert sample(model, plan).logprobs.tolist() == sample(model, None, compiled_kernels=False).logprobs.tolist()


def test_keys_and_values_are_rounded_where_the_cache_is_in_fp8() -> None:
    model = build("llama")
    plain = make_plan(NUMBER_FORMATS["nvfp4"])
    cached = make_plan(NUMBER_FORMATS["nvfp4"], fp8_cache=True)
    found = [sample(model, plan, paged_cache=paged).logprobs for plan in (plain, cached) for paged in (True, False)]
    assert (found[2] - found[3]).abs().max() < 1e-3, "pages and slots round alike"
    assert 1e-5 < (found[0][0] - found[2][0]).abs() < 0.2


def test_the_reason_for_slower_decoding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sample(build("llama"), make_plan(NUMBER_FORMATS["fp8_block"]))
    assert "which round their inputs to fp8_block" in caplog.text
    with pytest.raises(ValueError, match="do not round the inputs of layers"):
        sample(build("llama"), make_plan(NUMBER_FORMATS["fp8_block"]), compiled_kernels=True)


def test_weights_that_the_engine_cannot_round_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds only linear layers"):
        sample(build("gpt2"), make_plan(NUMBER_FORMATS["fp8_block"]))
