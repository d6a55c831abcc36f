"""The fused forward passes against the modules of Transformers that they replace."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from strop.models.attention.tree_plan import TreePlan
from strop.models.layers import segments
from strop.models.layers.fused_layers import _ATTENTION, FusedLayers, enable_fused_layers
from strop.models.layers.known_code import find_form, rms_norm_spec
from strop.models.layers.segments import compiling_segments
from strop.models.network import Network, probe_batch
from strop.sampling import Sampling
from strop.types import Batch
from support.graph_launches import compile_as_graph
from support.models import VOCABULARY, ExactNorm, build, copy_gradients, largest_difference
from support.sweep import one_in

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "mixtral", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
PRECISIONS = (torch.float32, torch.bfloat16)


def make_batch() -> Batch:
    batch = probe_batch(VOCABULARY)
    return replace(batch, advantages=torch.randn(len(batch.target), generator=torch.Generator().manual_seed(3)))


def without_rounding(model: Any) -> Any:
    """Convert a model to float64, with norms that do not round to float32."""
    for parent in list(model.double().modules()):
        for name, child in list(parent.named_children()):
            if (spec := rms_norm_spec(child)) is not None:
                setattr(parent, name, ExactNorm(child.weight, spec.eps, spec.offset))  # type: ignore[arg-type]
    return model


def run(network: Network, *, fused: bool, passes: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of a batch and the gradients of a loss on them."""
    batch = make_batch()
    network.model.zero_grad(set_to_none=True)
    layers = network.fused_layers if fused else FusedLayers(nn.Module())
    with layers.use(keep_copies=True):
        for _ in range(passes):
            outputs = network.outputs(batch, Sampling())
            (outputs.logprobs * batch.advantages).sum().backward()
    return outputs.logprobs.detach(), copy_gradients(network.model)


@pytest.mark.parametrize(
    "family", one_in(3, [family for family in FUSED if family not in MIXTURES])
)  # torch groups no experts in float64
def test_fused_layers_compute_what_the_modules_compute_in_float64(family: str) -> None:
    network = Network(without_rounding(build(family)), packed=True)
    plain, fused = run(network, fused=False), run(network, fused=True)
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=1e-12)
    assert largest_difference(fused[1], plain[1]) < 1e-12


@pytest.mark.parametrize("family", one_in(3, FUSED))
def test_fused_layers_compute_the_same_bits_in_float32(family: str) -> None:
    network = Network(build(family), packed=True)
    plain, fused = run(network, fused=False), run(network, fused=True)
    assert torch.equal(fused[0], plain[0])
    assert largest_difference(fused[1], plain[1]) < 5e-6


@pytest.mark.parametrize("family", one_in(3, FUSED))
def test_fused_layers_round_where_the_modules_round_under_autocast(family: str) -> None:
    network = Network(build(family), precision=torch.bfloat16, packed=True)
    exact = run(Network(build(family), packed=True), fused=False)
    plain, fused = run(network, fused=False), run(network, fused=True)
    rounding = (plain[0] - exact[0]).abs().max()
    assert (
        fused[0] - plain[0]
    ).abs().max() < 0.25 * rounding  # nearly the same bits; the tokens of a mixture may take other experts
    assert largest_difference(fused[1], exact[1]) < 1.5 * largest_difference(plain[1], exact[1])


@pytest.mark.parametrize("family", FUSED)
def test_most_modules_of_a_family_are_fused(family: str) -> None:
    network = Network(build(family), packed=True)
    per_layer = (
        2
        + 1
        + int(family not in MIXTURES)
        + (2 if family in ("qwen3", "qwen3_moe") else 0)
        + {"gemma2": 2, "gemma3": 4}.get(family, 0)
    )
    assert network.fused_layers.count == 2 * per_layer + 1


class Stranger(nn.Module):
    """An MLP of a package that nobody named."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.act_fn = nn.SiLU()

    def forward(self, x):  # type: ignore[no-untyped-def]
        """With Llama's code: another docstring and other types are no difference."""
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Swapped(Stranger):
    def forward(self, x):  # type: ignore[no-untyped-def]
        down_proj = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return down_proj


class Doubled(Stranger):
    def forward(self, x):  # type: ignore[no-untyped-def]
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return 2 * down_proj


def test_a_module_is_known_by_its_code_whatever_it_is_called() -> None:
    assert [FusedLayers(kind()).count for kind in (Stranger, Swapped, Doubled)] == [1, 0, 0]
    module, x = Stranger(), torch.randn(3, 4)
    expected = module(x)
    with FusedLayers(module).use(keep_copies=False):
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("ministral.MinistralAttention", "qwen2.Qwen2Attention"),
        ("qwen2_moe.Qwen2MoeAttention", "llama.LlamaAttention"),
        ("helium.HeliumAttention", None),  # Llama's code, but for the function that rotates: other pairs
        ("glm4.Glm4Attention", None),  # rotates part of a head
        ("smollm3.SmolLM3Attention", None),  # some layers rotate nothing
        ("olmo2.Olmo2Attention", None),  # norms over all heads
    ],
)
def test_attention_is_known_by_its_code_and_by_that_of_the_functions_it_calls(kind: str, form: str | None) -> None:
    family, _, name = kind.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert find_form(getattr(module, name), tuple(_ATTENTION)) == form


def test_a_module_is_as_before_outside_a_learners_pass() -> None:
    model = build("llama")
    tokens = torch.arange(20)[None]
    before = model(tokens).logits
    enable_fused_layers(model)
    assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_two_micro_batches_add_up_with_kept_copies_of_the_weights(dtype: torch.dtype) -> None:
    network = Network(build("qwen2"), precision=dtype, packed=True)
    once, twice = run(network, fused=True)[1], run(network, fused=True, passes=2)[1]
    for name in once:
        torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-6, atol=1e-7)


def test_new_weights_are_read_in_the_next_pass() -> None:
    network = Network(build("llama"), precision=torch.bfloat16, packed=True)
    before = run(network, fused=True)[0]
    with torch.no_grad():
        for parameter in network.model.parameters():
            parameter.mul_(1.01)
    after, expected = run(network, fused=True)[0], run(network, fused=False)[0]
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-2)


def test_bfloat16_weights_are_read_as_they_are() -> None:
    network = Network(build("llama", dtype=torch.bfloat16), precision=torch.bfloat16, packed=True)
    plain, fused = run(network, fused=False), run(network, fused=True)
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=2e-2)  # the same bits where packed products round as others do
    assert all(gradient.dtype == torch.bfloat16 for gradient in fused[1].values())
    assert largest_difference(fused[1], plain[1]) < 2e-2


def test_recomputed_activations_give_the_same_gradient_bit_for_bit() -> None:
    network = Network(build("qwen3"), precision=torch.bfloat16, packed=True)
    stored = run(network, fused=True)
    network.model.train()
    network.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed = run(network, fused=True)
    assert torch.equal(stored[0], recomputed[0])
    assert all(torch.equal(stored[1][name], recomputed[1][name]) for name in stored[1])


def test_a_linear_layer_with_a_hook_runs_itself() -> None:
    network = Network(build("llama"), packed=True)
    seen: list[Any] = []
    layer = network.model.model.layers[0]
    for linear in (layer.self_attn.k_proj, layer.mlp.up_proj, layer.self_attn.o_proj):
        linear.register_forward_hook(lambda module, inputs, output: seen.append(module))
    run(network, fused=True)
    assert len(seen) == 3


def test_a_copy_of_a_model_has_fused_layers_of_its_own() -> None:
    network = Network(build("llama"), packed=True)
    twin = Network(copy.deepcopy(network.model), packed=True)
    assert twin.fused_layers is not network.fused_layers
    with torch.no_grad():
        twin.model.model.layers[0].self_attn.q_proj.weight.zero_()
    with network.fused_layers.use(keep_copies=True), twin.fused_layers.use(keep_copies=True):
        assert not torch.equal(
            network.outputs(make_batch(), Sampling()).logprobs, twin.outputs(make_batch(), Sampling()).logprobs
        )


def test_frozen_weights_get_no_gradient() -> None:
    network = Network(build("llama"), packed=True)
    network.model.model.layers[0].requires_grad_(False)
    network.model.model.embed_tokens.requires_grad_(False)
    gradients = run(network, fused=True)[1]
    expected = run(network, fused=False)[1]
    assert largest_difference(gradients, expected) < 5e-6
    assert network.model.model.layers[0].mlp.up_proj.weight.grad is None


def nodes(outputs: Tensor) -> list[str]:
    """The names of the nodes of a gradient's graph."""
    found, waiting = {}, [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            waiting += [each for each, _ in node.next_functions]
    return list(found.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_a_layer_with_llamas_code_is_two_nodes_around_attention(family: str) -> None:
    network = Network(build(family), packed=True)

    def names() -> list[str]:
        with network.fused_layers.use(keep_copies=True):
            return nodes(network.outputs(make_batch(), Sampling()).logprobs)

    assert names().count("_BeforeBackward") == names().count("_AfterBackward") == 2
    layers: Any = network.decoder.layers
    layers[0].mlp.register_forward_hook(lambda *_: None)
    layers[1].self_attn.o_proj.forward = lambda x: x
    assert not {"_BeforeBackward", "_AfterBackward"} & set(names()), "what the module calls is not skipped"


class Count(TorchDispatchMode):
    """Counts the operators that are dispatched, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("compiled", "most"), [(False, 0.8), (True, 0.3)])
def test_a_layer_dispatches_fewer_operators_than_that_of_transformers(compiled: bool, most: float) -> None:
    """Both passes under autocast, attention left out: what a host has to do for a layer, whatever a machine computes.

    Of a segment that is compiled, what it launches counts, and the call.
    """

    def launched(count: int) -> None:
        counted.count += 1 + count

    def compile_segment(*arguments: Any) -> Any:
        run = compile_as_graph(launched)(*arguments)

        def alone(*tensors: Tensor) -> Any:
            with _disable_current_modes():
                return run(*tensors)

        return alone

    def call(form: Any, compiled: Any, weights: Any, tensors: Any) -> Any:
        return compiled(*(tensor for each in weights for tensor in each.tensors), *tensors)

    def count(layers: int, *, fused: bool) -> int:
        network = Network(build("llama", layers=layers), precision=torch.bfloat16, packed=True)
        used = network.fused_layers if fused else FusedLayers(nn.Module())
        with pytest.MonkeyPatch.context() as patch, used.use(keep_copies=True), compiling_segments(compiled):
            patch.setattr(TreePlan, "attend", lambda plan, query, key, value, spec: query)
            patch.setattr(segments, "compile_segment", compile_segment)
            patch.setattr(segments, "_choose", call)  # as if chosen before
            network.outputs(make_batch(), Sampling()).logprobs.sum().backward()
            network.model.zero_grad(set_to_none=True)
            counted.count = 0
            with counted:
                network.outputs(make_batch(), Sampling()).logprobs.sum().backward()
        return counted.count

    counted = Count()
    ours, theirs = ((count(3, fused=fused) - count(1, fused=fused)) / 2 for fused in (True, False))
    assert ours <= most * theirs, (ours, theirs)
