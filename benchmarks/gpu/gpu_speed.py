"""How fast a GPU trains, decodes and publishes with Strop, beside its matrix rate and its bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from common import number, tree_pairs
from measurement import Reading, Target
from model_shapes import SIZES, TINY, ModelSize, build_model, make_batch

CONTEXTS = (2048, 8192, 32_768)
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}  # bfloat16, dense, as the vendor says
LEAST_TOKENS = 8192  # of one pass: shorter contexts are trained several at a time


def synchronize(target: Target) -> None:
    if target.device != "cpu":
        torch.cuda.synchronize()


def time_calls(target: Target, call: Callable[[], Any], *, seconds: float = 6.0, most: int = 5) -> float:
    """Return the median seconds of some calls after a first one that does not count: ``most`` of them, or as many as fit."""
    call()
    synchronize(target)
    found: list[float] = []
    while len(found) < most and (not found or sum(found) + found[-1] < seconds):
        started = time.perf_counter()
        call()
        synchronize(target)
        found.append(time.perf_counter() - started)
    return median(found)


@dataclass(frozen=True)
class MachineRates:
    """What the device reaches in one large bfloat16 product, and in copying (reads and writes)."""

    flops: float  # a second
    bandwidth: float  # bytes a second


@cache
def machine_rates(target: Target) -> MachineRates:
    side, size = (256, 2**20) if target.tiny else (8192, 2**30)
    left, right = (torch.randn(side, side, device=target.device).bfloat16() for _ in range(2))
    source = torch.empty(size, dtype=torch.uint8, device=target.device)
    destination = torch.empty_like(source)
    product = time_calls(target, lambda: left @ right, seconds=1.0, most=20)
    copying = time_calls(target, lambda: destination.copy_(source), seconds=1.0, most=20)
    return MachineRates(2 * side**3 / product, 2 * size / copying)


def machine(target: Target) -> list[Reading]:
    rates = machine_rates(target)
    found = {"TFLOP/s": rates.flops / 1e12, "GB/s": rates.bandwidth / 1e9}
    return [
        Reading(name="matrix rate, bfloat16", value=f"{number(found['TFLOP/s'])} TFLOP/s", numbers=found),
        Reading(name="bandwidth of a copy", value=f"{number(found['GB/s'])} GB/s", note="reads and writes"),
    ]


def learner(target: Target, name: str) -> list[Reading]:
    """Forward and backward of one model over each length of context."""
    size = TINY if target.tiny else SIZES[name]
    model = build_model(size, target.device, torch.bfloat16)
    rows = []
    for context in (32, 64) if target.tiny else CONTEXTS:
        try:
            rows.append(_learner_row(target, name, size, model, context))
        except Exception as error:  # the next length may do
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.150}"
            rows.append(Reading(name=f"learner, {name}, {context} tokens", value=f"failed: {reason}", ok=False))
        model.zero_grad(set_to_none=True)
    return rows


def _learner_row(target: Target, name: str, size: ModelSize, model: Any, context: int) -> Reading:
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.algorithms import grpo

    prompt = context // 8
    rollouts = max(1, LEAST_TOKENS // context) if not target.tiny else 2
    batch = make_batch(prompt, (context - prompt,) * rollouts, size.vocabulary, grpo())
    network = Network(model, precision=torch.bfloat16, packed=True)

    def train() -> None:
        outputs = network.outputs(batch, Sampling())
        (outputs.logprobs.sum() / len(batch.target)).backward()

    try:
        _set_checkpointing(model, False)
        seconds, note = time_calls(target, train), ""
    except torch.OutOfMemoryError:
        seconds = 0.0
    if not seconds:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        _set_checkpointing(model, True)
        seconds, note = time_calls(target, train), "activation checkpointing"
    pairs = tree_pairs(batch.segment_length.tolist(), batch.segment_parent.tolist())
    flops = 6.0 * (size.layer_weights * len(batch.tokens) + size.head_weights * len(batch.target))
    flops += 12.0 * size.layers * size.heads * size.head_size * pairs
    return Reading(
        name=f"learner, {name}, {rollouts} x {context} tokens",
        **_rate_columns(target, flops / seconds, len(batch.tokens) / seconds, [note, _peak_memory(target)]),
    )


def _set_checkpointing(model: Any, enabled: bool) -> None:
    model.train(enabled)
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()


def _rate_columns(target: Target, flops: float, tokens: float, notes: Iterable[str]) -> dict[str, Any]:
    """Return a row's value, note and numbers: MFU where the vendor's rate is known, the share of the measured rate anyway."""
    device = "CPU" if target.device == "cpu" else torch.cuda.get_device_name()
    peak = next((rate for name, rate in PEAK_TFLOPS.items() if name in device), None)
    share = flops / machine_rates(target).flops
    numbers = {"TFLOP/s": flops / 1e12, "share of the measured rate": share, "tokens/s": tokens}
    parts = [f"{share:.0%} of the measured matrix rate"]
    if peak is not None:
        numbers["MFU"] = flops / 1e12 / peak
        parts.insert(0, f"MFU {numbers['MFU']:.0%}")
    note = ", ".join([f"{number(numbers['TFLOP/s'])} TFLOP/s", f"{tokens:,.0f} tokens/s", *(each for each in notes if each)])
    return {"value": ", ".join(parts), "note": note, "numbers": numbers}


def _peak_memory(target: Target) -> str:
    if target.device == "cpu":
        return ""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"peak {peak:.1f} GiB"


def decoding(target: Target, name: str) -> list[Reading]:
    """Tokens a second of the embedded engine, and what share of the bandwidth it takes to read weights and keys once for each."""
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.torch_engine import Request, make_engine, make_runner, run_requests

    size = TINY if target.tiny else SIZES[name]
    model = build_model(size, target.device, torch.bfloat16)
    network = Network(model, precision=torch.bfloat16, packed=True)
    rows = []
    for count in (4,) if target.tiny else (16, 64):
        prompt, new = (8, 8) if target.tiny else (128, 256)
        runner = make_runner(network, slots=count, length=prompt + new + 8, prefix_tokens=count * (prompt + 16), cuda_graphs=True)
        generator = torch.Generator().manual_seed(0)

        def requests(length: int, count: int = count, prompt: int = prompt, generator: Any = generator) -> list[Any]:
            drawn = torch.randint(4, size.vocabulary, (count, prompt), generator=generator).tolist()
            return [Request(tokens, Sampling(max_new_tokens=length), seed) for seed, tokens in enumerate(drawn)]

        run_requests(make_engine(runner), requests(max(new // 8, 4)))
        seconds = []
        for length in (1, new):  # the difference is decoding alone
            started = time.perf_counter()
            run_requests(make_engine(runner), requests(length))
            synchronize(target)
            seconds.append(time.perf_counter() - started)
        spent = max(seconds[1] - seconds[0], 1e-9)
        keys = 2 * size.layers * size.kv_heads * size.head_size * 2 * count * (prompt + new / 2)  # bytes, on the average
        weights = 2 * (size.layer_weights + size.head_weights)
        share = (weights + keys) * (new - 1) / spent / machine_rates(target).bandwidth
        rate = count * (new - 1) / spent
        rows.append(
            Reading(
                name=f"decoding, {name}, {count} sequences",
                value=f"{rate:,.0f} tokens/s, {share:.0%} of bandwidth",
                note=f"{1000 * spent / (new - 1):.2f} ms a token of each",
                numbers={"tokens/s": rate, "share of bandwidth": share},
            )
        )
        del runner
    return rows


def publishing(target: Target, name: str) -> list[Reading]:
    """Seconds to bring a model's weights to another copy on the device, to the host, and to fingerprint them."""
    from strop.weight_sync.fingerprints import fingerprint

    size = TINY if target.tiny else SIZES[name]
    source = [each.detach() for each in build_model(size, target.device, torch.bfloat16).parameters()]
    copies = [torch.empty_like(each) for each in source]
    pinned = target.device != "cpu"
    host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for each in source]
    size_gb = sum(each.nbytes for each in source) / 1e9

    def copy_to(others: list[torch.Tensor]) -> None:
        for own, other in zip(source, others, strict=True):
            other.copy_(own, non_blocking=True)

    timed = {
        "fingerprints of all weights": time_calls(target, lambda: [fingerprint(each) for each in source], most=3),
        "publish on the device": time_calls(target, lambda: copy_to(copies), most=3),
        "publish to the host": time_calls(target, lambda: copy_to(host), most=3),
    }
    return [
        Reading(
            name=f"{part}, {name}",
            value=f"{number(seconds)} s",
            note=f"{number(size_gb)} GB at {number(size_gb / seconds)} GB/s",
            numbers={"seconds": seconds, "GB/s": size_gb / seconds},
        )
        for part, seconds in timed.items()
    ]
