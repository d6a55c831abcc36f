"""The compiled kernels compute what torch computes, and are left out where they cannot.

In bfloat16 a difference is one rounding at most: these processors' own products sum in one order, and torch's may sum in another elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.generation.torch import decode_kernels
from strop.generation.torch.decode_kernels import DecodeKernels, KernelsUnavailable, load_kernels
from strop.generation.torch.fast_layers import choose_kernels, find_obstacle
from strop.generation.torch.model_runner import CachedRunner, SlotPrompt, infer_cache_shape
from strop.generation.torch.sampler import sample_tokens
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.network import Network
from strop.sampling import Sampling
from support import paged_reference
from support.models import VOCABULARY, build, make_config
from support.sweep import one_in

DTYPES = (torch.float32, torch.bfloat16)
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.02}
KNOWN = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2")


@pytest.fixture
def kernels() -> DecodeKernels:
    try:
        return load_kernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def no_library() -> Iterator[None]:
    """Forget the loaded library before and after a test."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def make_runner(network: Network, compiled: bool | None) -> CachedRunner:
    memory = 8 * 64 * infer_cache_shape(network).bytes_per_token / 2**30
    config = TorchGenerationConfig(kv_cache_memory_gb=memory, max_num_seqs=4, compiled_kernels=compiled)
    return CachedRunner(network, config, length=64)


def decode(network: Network, compiled: bool, rows: int = 3, steps: int = 12) -> Tensor:
    """Log-probabilities of ``steps`` steps after prompts of different lengths, [steps, rows, V]."""
    runner = make_runner(network, compiled)
    runner.activate()
    try:
        assert (runner.layers is not None) is compiled
        lengths = [3 + 4 * row for row in range(rows)]
        for row, length in enumerate(lengths):  # one by one: the modules' rounding depends on the others in a pass
            runner.prefill([SlotPrompt(row, tuple(range(5, 5 + length)))])
        logits = [
            runner.decode([7 + 3 * step + row for row in range(rows)], [length + step for length in lengths])
            for step in range(steps)
        ]
        return torch.stack(logits).float().log_softmax(-1)
    finally:
        runner.deactivate()


@pytest.mark.parametrize("family", one_in(4, KNOWN))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_the_kernels_is_one_of_the_modules(kernels: DecodeKernels, family: str, dtype: torch.dtype) -> None:
    """Beyond the sliding windows of 7 positions, with norms and biases that are not their initial ones."""
    model = build(family)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    network = Network(model, precision=dtype)
    assert (decode(network, True) - decode(network, False)).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_as_large_as_those_of_real_models_agree(kernels: DecodeKernels, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    options = make_config("llama").to_dict() | {
        "hidden_size": 96,
        "head_dim": 64,
        "num_attention_heads": 6,
        "intermediate_size": 200,
    }
    torch.manual_seed(0)
    network = Network(AutoModelForCausalLM.from_config(type(make_config("llama"))(**options)).eval(), precision=dtype)
    assert (decode(network, True) - decode(network, False)).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_does_not_depend_on_the_others_in_its_batch(kernels: DecodeKernels, dtype: torch.dtype) -> None:
    network = Network(build("llama"), precision=dtype)
    assert torch.equal(decode(network, True, rows=1), decode(network, True, rows=4)[:, :1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [(None, None), (20, None), (None, 5.0), (37, 30.0)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "pages"), [(6, 2, 64, 16, 5), (5, 1, 8, 32, 2), (4, 4, 128, 96, 1)]
)
def test_attention_over_pages_is_that_of_the_reference(
    kernels: DecodeKernels, heads: int, kv_heads: int, size: int, page: int, pages: int, options: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    batch, (window, softcap) = 5, options
    query = (2 * torch.randn(batch, heads, size)).to(dtype)
    keys, values = (torch.randn(batch * pages, kv_heads, page, size).to(dtype) for _ in range(2))
    table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
    lengths = torch.tensor([1, 17, 40, page * pages - 1, page * pages], dtype=torch.int32)
    arguments = (query, keys, values, table, lengths, size**-0.5, window, softcap)
    found, expected = kernels.attend_pages(*arguments), paged_reference.attend_pages(*arguments)
    assert (found.float() - expected.float()).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 2048])
def test_sampled_tokens_are_those_of_the_reference(kernels: DecodeKernels, vocabulary: int, dtype: torch.dtype) -> None:
    """The numbers are equal, so tokens differ only where a number falls between two sums that round differently."""
    torch.manual_seed(0)
    logits, uniforms = (4 * torch.randn(2000, vocabulary)).to(dtype), torch.rand(2000).tolist()
    for temperature in (1.0, 0.7):
        sampling = [Sampling(temperature=temperature, entropy=True)] * len(logits)
        found, expected = sample_tokens(logits, sampling, uniforms, kernels=kernels), sample_tokens(logits, sampling, uniforms)
        same = found.tokens == expected.tokens
        assert same.float().mean() > 0.998
        assert (found.logprobs - expected.logprobs)[same].abs().max() < 1e-5
        assert (found.entropies - expected.entropies).abs().max() < 1e-5


def test_tokens_without_probability_are_never_sampled(kernels: DecodeKernels) -> None:
    logits = torch.full((4, VOCABULARY), float("-inf"))
    logits[:, [3, 300]] = 0.0
    found = sample_tokens(logits, [Sampling()] * 4, [0.0, 0.4, 0.6, 1.0 - 2**-24], kernels=kernels)
    assert found.tokens.tolist() == [3, 3, 300, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_weights_are_those_that_it_decodes_with(kernels: DecodeKernels, dtype: torch.dtype) -> None:
    """After each refresh; a norm's factors that were not refreshed are found by name."""
    network = Network(build("gemma"), precision=dtype)
    runner = make_runner(network, True)
    for _ in range(2):
        runner.activate()
        runner.prefill([SlotPrompt(0, (5, 6, 7))])
        found = runner.decode([9], [3]).float().log_softmax(-1)
        assert {
            name for name, tensor in runner.named_weights() if not torch.equal(tensor, network.model.get_parameter(name))
        } <= (set() if dtype == torch.float32 else {name for name, _ in runner.named_weights()})
        runner.deactivate()
        plain = make_runner(network, False)
        plain.activate()
        plain.prefill([SlotPrompt(0, (5, 6, 7))])
        assert (found - plain.decode([9], [3]).float().log_softmax(-1)).abs().max() < BOUNDS[dtype]
        plain.deactivate()
        for parameter in network.model.parameters():
            parameter.data *= 1.1
    assert set(runner.layers.find_stale_norms()) == {name for name, _ in network.model.named_parameters() if "norm" in name}


def test_models_that_the_kernels_do_not_know_say_why() -> None:
    assert "do not know the layers of MixtralModel" in str(find_obstacle(Network(build("mixtral"))))
    assert "torch.bfloat16" in str(find_obstacle(Network(build("llama", dtype=torch.bfloat16))))
    hooked = Network(build("llama"))
    assert find_obstacle(hooked) is None
    hooked.model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "hooks" in str(find_obstacle(hooked))


def test_without_a_compiler_the_modules_decode_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, no_library: None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    network = Network(build("llama"))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(network, None, prepack=None) is None
    assert "slower than with compiled kernels: there is no C++ compiler: install g++" in caplog.text
    with pytest.raises(ValueError, match=r"compiled_kernels is true, but .* no C\+\+ compiler"):
        choose_kernels(network, True, prepack=None)
    with pytest.raises(ValueError, match=r"prepack_weights is false"):
        choose_kernels(network, True, prepack=False)
    assert choose_kernels(network, False, prepack=None) is None


def test_a_source_that_does_not_compile_is_reported_with_its_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: DecodeKernels, no_library: None
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no program\n")
    monkeypatch.setattr(decode_kernels, "SOURCE", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=r"fails: .*broken\.cpp.*error"):
        load_kernels()
    assert list((tmp_path / "strop").iterdir()) == []


def test_kernels_that_compute_something_else_are_left_out_with_a_warning(
    kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(build("llama"))
    right = decode(network, False)
    correct = DecodeKernels.decode
    monkeypatch.setattr(DecodeKernels, "decode", lambda *arguments, **options: correct(*arguments, **options).flip(-1))
    runner = make_runner(network, None)
    with caplog.at_level(logging.WARNING):
        runner.activate()
    assert "their log-probabilities of LlamaForCausalLM differ by" in caplog.text
    runner.prefill([SlotPrompt(0, (5, 6, 7))])
    assert torch.allclose(runner.decode([7], [3]).log_softmax(-1), right[0, 0], atol=1e-4)
    runner.deactivate()


def test_a_library_of_another_user_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_library: None) -> None:
    def build_theirs(compiler: str, path: Path) -> None:
        path.parent.mkdir()
        path.write_bytes(b"theirs")
        if os.getuid() == 0:
            os.chown(path, 777, 777)

    monkeypatch.setattr(decode_kernels, "_build", build_theirs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(KernelsUnavailable, match=r"belongs to user \d+, whose code would run here; remove it"):
        load_kernels()
