"""Compiled decoder layers against the modules, and when layers are compiled."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.parallelism import RankLayers
from strop.learner.torch import layer_compilation
from strop.learner.torch.layer_compilation import choose_layer_compilation, find_obstacle
from strop.learner.torch.scorer import copy_frozen
from strop.models.layers import fused_functions, segments
from strop.models.layers.compiled_layers import CompiledLayers, find_compiled_layers, keep_cache, use_learner_layers
from strop.models.layers.fused_functions import norm_gradients
from strop.models.layers.known_code import RmsNormSpec, decoder_layers
from strop.models.layers.weight_copies import JoinedWeights, LinearWeights, SeparateWeights
from strop.models.network import Network, probe_batch
from strop.models.value_network import ValueHead
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.models import VOCABULARY, build, copy_gradients, largest_difference
from support.parity import SAMPLING, Case, build_trained_network, make_batch
from support.sweep import sweep, sweep_rows

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="a CPU needs a C++ compiler")
FAMILIES = ("qwen2", "qwen3", "mistral", "gemma", "gemma2")


@pytest.fixture(autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep compiled code in one folder for all of these tests, out of the user's, and forget it in this process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    segments.compile_segment.cache_clear()
    segments._code.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def run(network: Network, *, compiled: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of a batch of 28 tokens and the gradients of a loss on them."""
    batch = probe_batch(VOCABULARY)
    advantages = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(3))
    network.model.zero_grad(set_to_none=True)
    with use_learner_layers(network if compiled else object(), keep_copies=True):
        outputs = network.outputs(batch, Sampling())
        (outputs.logprobs * advantages).sum().backward()
    return outputs.logprobs.detach(), copy_gradients(network.model)


def compare(network: Network, bound: float) -> CompiledLayers:
    """Compare the passes of a network before and after its layers are compiled, over a row of another length than they are tried with."""
    plain = run(network, compiled=False)
    compiled = choose_layer_compilation(network, True, "policy")
    assert compiled is not None
    parts = compiled.compiled
    found = run(network, compiled=True)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=bound)
    assert largest_difference(found[1], plain[1]) < bound
    assert compiled.compiled == parts > 0, "a row of another length was compiled again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "compile_segment", None)  # a second pass goes to compiled code directly
        assert torch.equal(run(network, compiled=True)[0], found[0])
    return compiled


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_layers(monkeypatch)


def trace_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers traced, divided and run as they are compiled, by torch's own operators."""
    compile_with = torch.compile

    def trace(function: Any, *, dynamic: bool, options: Mapping[str, Any] | None = None, backend: Any = "eager") -> Any:
        return compile_with(function, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, examples, options: graph)


@pytest.mark.slow
def test_traced_layers_compute_what_the_modules_compute_for_rows_of_any_length(traced: None) -> None:
    compare(Network(build("llama", layers=1), packed=True), 2e-5)


def segment(constants: Any, weights: Any, *tensors: Tensor) -> Any:
    return norm_gradients(constants, *tensors)


@pytest.mark.slow
def test_guards_choose_the_code_of_a_segment_once_for_tensors_of_a_form(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again for other values of them: the rest of a warm pass does not enter torch.compile."""
    choose, chosen = segments._choose, []
    monkeypatch.setattr(segments, "_choose", lambda form, *others: chosen.append(form) or choose(form, *others))
    spec, wide = RmsNormSpec(1e-6, 0.0, True), torch.float32
    forms = [(7, 16, wide, True), (9, 16, wide, True), (1, 16, wide, True), (7, 8, wide, True)]
    forms += [(7, 16, torch.bfloat16, True), (7, 16, wide, False)]
    for rows, size, dtype, contiguous in forms:
        for needs_weight in (True, False):
            chosen.clear()
            for _ in range(3):
                # the gradient, its rows, what they were scaled by, and what is added: not in the order that the graph takes them in
                grad, x, added = torch.randn(3, rows, 2 * size).to(dtype).split(size, -1)[0]
                if contiguous:
                    grad, x, added = (each.contiguous() for each in (grad, x, added))
                tensors = (grad, x, torch.rand(rows, 1), torch.randn(size, requires_grad=True), added)
                constants = (spec, True, needs_weight)
                with torch.no_grad():
                    expected = segment(constants, (), *tensors)
                    with segments.compiling_segments():
                        found = segments.run_segment(segment, constants, (), *tensors)
                assert (found[1] is None) == (not needs_weight)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other)
            assert len(chosen) == 1, (rows, size, dtype, contiguous)


def check_segment(function: Any, constants: Any, weights: Any, *tensors: Tensor) -> Any:
    with torch.no_grad():
        plain = segments.run_segment(function, constants, weights, *tensors)
        with segments.compiling_segments():
            for _ in range(2):  # by torch.compile, and directly
                found = segments.run_segment(function, constants, weights, *tensors)
                for one, other in zip(found, plain, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return plain


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["separate", "joined", "biased"])
def test_both_sides_of_attention_are_in_float64_what_they_are_as_written(kind: str) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=wide)

    def make_weights(inputs: int, *sizes: int) -> LinearWeights:
        matrices, biases = [draw(size, inputs) for size in sizes], [draw(size) for size in sizes]
        if kind == "separate":
            return SeparateWeights(tuple(matrices), (None,) * len(sizes))
        return JoinedWeights(sizes, torch.cat(matrices), None, torch.cat(biases) if kind == "biased" else None)

    wide, rows, spec = torch.float64, 7, RmsNormSpec(1e-6, 0.0, True)
    number = 2 if kind == "biased" else 1  # parameters of a linear layer
    before = fused_functions.BeforeAttention(spec, (spec, spec), wide, 4, wide, wide)
    inputs = (draw(rows, 16), draw(rows, 1, 4), draw(rows, 1, 4), draw(16), draw(4), draw(4))
    heads, weights = (16, 8, 8), [make_weights(16, 16, 8, 8)]
    made = check_segment(fused_functions.compute_heads, before, weights, *inputs)
    grads = [draw(rows, size // 4, 4) for size in heads]
    constants: Any = (before, (True,) * (4 + 3 * number), (wide,) * (3 * number))
    check_segment(fused_functions.head_gradients, constants, weights, *grads, *inputs, *made[3:])

    after = fused_functions.AfterAttention(spec, fused_functions.SILU, wide)
    weights = [make_weights(16, 16), make_weights(16, 24, 24), make_weights(24, 16)]
    x, attended, norm = draw(rows, 16), draw(rows, 16), draw(16)
    made = check_segment(fused_functions.finish_layer, after, weights, x, attended, norm)
    constants = (after, (True,) * (3 + 4 * number), tuple((wide,) * (count * number) for count in (1, 2, 1)))
    check_segment(fused_functions.layer_gradients, constants, weights, draw(rows, 16), attended, norm, *made[1:])


def check_replacement(family: str) -> None:
    """What an engine or a user replaces is seen, in a layer that is compiled as it is and in a fused one. Its passes compile nothing."""
    network = Network(build(family, layers=1), packed=True)
    compiled = compare(network, 2e-5)
    parts, before = compiled.compiled, run(network, compiled=True)
    mlp = network.decoder.layers[0].mlp  # type: ignore[union-attr, index]
    up = mlp.up_proj.forward  # type: ignore[union-attr]
    mlp.up_proj.forward = lambda x: up(x) + 1  # type: ignore[union-attr, operator]
    plain = run(network, compiled=False)
    assert compiled.compiled == parts
    found = run(network, compiled=True)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=2e-5)
    assert largest_difference(found[1], plain[1]) < 2e-5
    assert float((found[0] - before[0]).abs().max()) > 1e-2 and largest_difference(found[1], before[1]) > 1e-2
    del mlp.up_proj.forward  # type: ignore[union-attr]
    assert torch.equal(run(network, compiled=True)[0], before[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", sweep(["llama", "gemma2"], "llama"))
def test_traced_layers_see_what_an_engine_replaces_and_its_passes_do_not_compile(family: str, traced: None) -> None:
    check_replacement(family)


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_layers_compute_what_the_modules_compute_for_rows_of_any_length() -> None:
    network = Network(build("llama"), packed=True)
    state = torch.random.get_rng_state()
    compare(network, 2e-5)
    assert torch.equal(state, torch.random.get_rng_state())


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_layers_see_what_an_engine_replaces_and_its_passes_do_not_compile() -> None:
    check_replacement("llama")


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_of_other_families_compute_what_their_modules_compute(family: str) -> None:
    compare(Network(build(family), packed=True), 2e-5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_layers_round_where_the_modules_round_under_autocast() -> None:
    """In gradients they round less often: of an input that several products share it is one product, and no sum of rounded ones."""
    network = Network(build("llama"), packed=True, precision=torch.bfloat16)
    plain, exact = run(network, compiled=False), run(Network(build("llama"), packed=True), compiled=False)[1]
    assert choose_layer_compilation(network, True, "policy") is not None
    found = run(network, compiled=True)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-4)
    assert 0 < distance(found[1], exact) < 1.1 * distance(plain[1], exact) < 0.03


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the length of the difference, relative to that of what is exact."""
    parts = [(torch.sum((found[name] - exact[name]) ** 2), torch.sum(exact[name] ** 2)) for name in exact]
    return float((sum(part for part, _ in parts) / sum(whole for _, whole in parts)) ** 0.5)  # type: ignore[operator]


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.5, True])
def test_a_learner_recomputes_compiled_layers_in_its_backward_pass(share: float) -> None:
    network = Network(build("llama"), packed=True)
    plain = run(network, compiled=False)
    learner = make_torch_learner(network, Sampling(), activation_checkpointing=share, compile_layers=True)
    assert network.compiled_layers is not None and ValueHead(network).compiled_layers is network.compiled_layers
    assert learner.model.training
    found = run(network, compiled=True)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=2e-5)
    assert largest_difference(found[1], plain[1]) < 2e-5


def train_on_rank(rank: int, case: Case, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Return the weights after a step with and without compiled segments, and how many of these ran."""
    found, count, run_segment = [], 0, fused_functions.run_segment

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += segments._settings is not None
        return run_segment(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        trace_layers(patch)
        patch.setattr(fused_functions, "run_segment", counted)
        for compile_layers in (False, True):
            assert count == 0
            network, placement = build_trained_network(case, DeviceMeshes(case.sizes, "cpu"))
            state = torch.random.get_rng_state()
            learner = make_torch_learner(network, SAMPLING, placement, train_tokens=40, compile_layers=compile_layers)
            assert torch.equal(state, torch.random.get_rng_state())
            learner.forward_backward_local(batch, grpo().loss)
            learner.step()
            found.append({name: weight.clone() for name, weight in learner.parallelism.weights()})
    return found[0], found[1], count


SHARDED = Case(sizes=ParallelDims(shard=2), dtype=torch.float32)
PIPELINED = replace(SHARDED, sizes=ParallelDims(pipeline=2))
GATHERED = replace(SHARDED, precision=torch.bfloat16, gather_dtype=torch.bfloat16, reshard=False)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "bound"), sweep_rows([(SHARDED, 1e-6), (PIPELINED, 1e-6), (GATHERED, 1e-4)], (GATHERED, 1e-4)))
def test_ranks_train_with_compiled_segments_as_without_them(case: Case, bound: float) -> None:
    """A step of AdamW moves a weight by 1e-2."""
    for plain, compiled, count in run_on_ranks(2, train_on_rank, case, replace(make_batch(case), zero_gradient=None)):
        assert count > 0
        for name, weight in plain.items():
            torch.testing.assert_close(compiled[name], weight, rtol=0, atol=bound)


@needs_compiler
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_frozen_copy_computes_the_bits_of_the_network() -> None:
    network = Network(build("llama"), packed=True, precision=torch.bfloat16)
    choose_layer_compilation(network, True, "policy")
    twin = copy_frozen(network)
    assert twin.compiled_layers is not None and twin.compiled_layers is not network.compiled_layers
    batch = probe_batch(VOCABULARY)
    found = []
    for each in (network, twin):
        with torch.no_grad(), use_learner_layers(each, keep_copies=True):
            found.append(each.outputs(batch, Sampling()).logprobs)
    assert torch.equal(*found)


@pytest.fixture
def network() -> Network:
    return Network(build("llama"), packed=True)


def test_a_cpu_compiles_nothing_by_itself(network: Network) -> None:
    assert choose_layer_compilation(network, "auto", "policy") is None
    assert choose_layer_compilation(network, False, "policy") is None
    assert find_compiled_layers(network.model) is None


def test_what_cannot_be_compiled_is_refused_with_the_reason(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"policy\.compile: found true, but the learner is on ranks that divide matrices"):
        choose_layer_compilation(network, True, "policy", ranks=RankLayers(torch.float32, divided=True))
    with pytest.raises(ValueError, match=r"not fused as a whole \(Gemma2DecoderLayer\)"):
        ranks = RankLayers(torch.float32, divided=False)
        choose_layer_compilation(Network(build("gemma2"), packed=True), True, "policy", ranks=ranks)
    with pytest.raises(ValueError, match=r"value\.compile: found true, but the model reads padded rows"):
        choose_layer_compilation(Network(build("llama"), packed=False), True, "value")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"no C\+\+ compiler on this machine \(install g\+\+\)\. Set it to auto or false"):
        choose_layer_compilation(network, True, "policy")


@pytest.mark.parametrize("attribute", ["exact", "routed"])
def test_exact_networks_and_replayed_routers_are_not_compiled(network: Network, attribute: str) -> None:
    setattr(network, attribute, object())
    assert "policy." in (find_obstacle(network, known_only=False) or "")


def test_hooks_and_unknown_layers_are_not_compiled(network: Network) -> None:
    assert "Phi3DecoderLayer" in (find_obstacle(Network(build("phi3"), packed=True), known_only=True) or "")
    decoder_layers(network.decoder)[0].register_forward_hook(lambda *_: None)
    assert "hooks" in (find_obstacle(network, known_only=False) or "")


@needs_compiler
@pytest.mark.slow  # torch.compile takes seconds to import
@pytest.mark.parametrize("failure", ["other values", "compiler error", "no message"])
def test_layers_that_fail_their_trial_run_as_before(network: Network, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def compare(calls: Any, compiled: CompiledLayers) -> list[float]:
        if failure == "other values":
            return [0.5 for _ in calls]
        raise RuntimeError("the compiler crashed\nat length") if failure == "compiler error" else TypeError

    monkeypatch.setattr(layer_compilation, "_compare", compare)
    with pytest.raises(
        ValueError,
        match=r"differ by 0\.5 of their size|torch\.compile failed: (RuntimeError: the compiler crashed|TypeError: no message)",
    ):
        choose_layer_compilation(network, True, "policy")
    assert network.compiled_layers is None and find_compiled_layers(network.model) is None
    plain = run(network, compiled=False)
    assert torch.equal(run(network, compiled=True)[0], plain[0])


def test_a_copy_of_a_model_says_for_itself_when_its_layers_are_compiled(network: Network) -> None:
    compiled = CompiledLayers(decoder_layers(network.decoder))
    twin = find_compiled_layers(copy.deepcopy(network.model))
    assert twin is not None and twin is not compiled
    with compiled.use(keep_copies=False):
        assert compiled.active and not twin.active
    assert not compiled.active


def test_compiled_code_is_kept_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("compiled")  # a folder that is set stays
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "strop" / "compiled_layers"
    for unset in ("", default_cache_dir()):  # which torch sets itself
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", unset)
        keep_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder) and folder.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored by the fixture")
