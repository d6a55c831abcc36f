"""Recomputed and offloaded activations: less is kept, and no bit of a gradient changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strop.learner.torch.tensor_offload import ActivationOffload, checkpoint_layers, spread
from strop.models.layers.known_code import decoder_layers
from strop.models.network import Network, probe_batch
from strop.sampling import Sampling
from support.learners import make_torch_learner
from support.models import VOCABULARY, build, copy_gradients


def make_network(dtype: torch.dtype = torch.float32, family: str = "llama") -> Network:
    return Network(build(family, layers=4), precision=dtype, packed=True)


def run(network: Network, offload: ActivationOffload | None = None) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return log-probabilities, gradients and the bytes that stay where they were for the backward pass."""
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    network.model.zero_grad(set_to_none=True)
    with network.fused_layers.use(keep_copies=True):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor) if offload is None else offload.in_forward():
            outputs = network.outputs(probe_batch(VOCABULARY), Sampling())
        outputs.logprobs.sum().backward()
    return outputs.logprobs.detach(), copy_gradients(network.model), sum(kept)


@given(count=st.integers(1, 100), share=st.floats(0, 1))
def test_a_share_of_the_layers_is_spread_evenly(count: int, share: float) -> None:
    chosen = spread(count, share)
    assert len(chosen) == count and sum(chosen) == round(count * share)
    for start in range(count):
        for end in range(start, count):
            assert abs(sum(chosen[start:end]) - (end - start) * sum(chosen) / count) < 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_recomputing_more_layers_keeps_less_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    kept = []
    expected = run(make_network(dtype))
    for share, layers in ((0.0, 0), (0.5, 2), (0.75, 3), (1.0, 4)):
        network = make_network(dtype)
        network.model.train()
        assert checkpoint_layers(network.model, decoder_layers(network.decoder), share) == layers
        logprobs, gradients, bytes_kept = run(network)
        assert torch.equal(logprobs, expected[0])
        assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients)
        kept.append(bytes_kept)
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[2] < kept[1] < kept[0]


def test_a_model_whose_layers_cannot_be_chosen_says_so() -> None:
    network = make_network()
    with pytest.raises(ValueError, match=r"activation_checkpointing: found 0\.5, but LlamaForCausalLM cannot"):
        checkpoint_layers(network.model, [torch.nn.Linear(2, 2)], 0.5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_offloaded_activations_give_the_same_bits(dtype: torch.dtype) -> None:
    network, offload = make_network(dtype), ActivationOffload(torch.device("cpu"), min_bytes=256)
    expected, found = run(network), run(network, offload)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    assert offload.offloaded_bytes > 0.2 * expected[2]


def test_weights_and_small_tensors_are_not_offloaded() -> None:
    network, offload = make_network(), ActivationOffload(torch.device("cpu"), min_bytes=1 << 30)
    run(network, offload)
    assert offload.offloaded_bytes == 0
    weight = network.model.model.layers[0].mlp.up_proj.weight
    packed = ActivationOffload(torch.device("cpu"), min_bytes=1)._offload(weight.t())
    assert packed[0].data_ptr() == weight.data_ptr() and packed[1] is None


def test_a_learner_recomputes_a_share_and_says_that_offloading_needs_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"activation_checkpointing": 0.5, "activation_offload": True}
    with caplog.at_level(logging.INFO):
        learner = make_torch_learner(make_network(), Sampling(), **options)
    assert [layer.gradient_checkpointing for layer in learner.model.model.layers] == [False, True, False, True]  # type: ignore[union-attr]
    assert "2 of 4 layers recompute their activations" in caplog.text
    assert "activation_offload has no effect" in caplog.text
