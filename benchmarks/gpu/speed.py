"""How fast a GPU trains, publishes and decodes with Strop. Each function is one job, alone on the device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from common import number, tree_pairs
from job import Target, describe_error, prepare_device, write_row
from models import ModelSize, build_model, choose_size, make_batch

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}  # bfloat16, dense, as the vendor says
KERNELS_LISTED = 24
ANSWER_SECONDS = 40.0  # of the process that receives weights
GPUS_NEEDED = {"cuda_ipc": 1, "nccl": 2}


def time_calls(target: Target, call: Callable[[], Any], *, seconds: float = 4.0, most: int = 5, warm: int = 2) -> float:
    """Return the median seconds of some calls after ``warm`` ones that do not count: ``most`` of them, or as many as fit."""
    for _ in range(warm):
        call()
    target.synchronize()
    found: list[float] = []
    while len(found) < most and sum(found) < seconds:
        started = time.perf_counter()
        call()
        target.synchronize()
        found.append(time.perf_counter() - started)
    return median(found)


def machine(target: Target) -> None:
    """What the device reaches in one large bfloat16 product, and in copying on it and to the host."""
    side, size = (256, 2**20) if target.tiny else (8192, 2**30)
    left, right = (torch.randn(side, side, device=target.device).bfloat16() for _ in range(2))
    rate = 2 * side**3 / time_calls(target, lambda: left @ right, seconds=1.0, most=20) / 1e12
    write_row("matrix rate, bfloat16", f"{number(rate)} TFLOP/s", tflops=rate)
    source, pageable = (torch.empty(size, dtype=torch.uint8, device=device) for device in (target.device, "cpu"))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=target.device == "cuda")
    onto = {
        "on the device, reads and writes": torch.empty_like(source),
        "to pinned memory": pinned,
        "to pageable memory": pageable,
    }
    for name, other in onto.items():
        factor = 2 if other.device == source.device else 1
        speed = factor * size / time_calls(target, lambda other=other: other.copy_(source), seconds=1.0, most=20) / 1e9
        write_row(f"copy {name}", f"{number(speed)} GB/s", gigabytes=speed)


# --- the learner -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """What a micro-batch of made-up groups has: each has a prompt and as many completions."""

    groups: int
    prompt: int
    completions: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.groups} x ({self.prompt} + {len(self.completions)} x {self.completions[0]})"


SHORT, GROUP, TWO_GROUPS = Pass(1, 256, (1792,)), *(Pass(groups, 256, (1792,) * 4) for groups in (1, 2))
LONG = Pass(1, 1024, (15_360,) * 2)
TINY_PASS = Pass(1, 8, (8, 6))
LEARNERS: dict[str, list[tuple[torch.dtype, bool, Sequence[Pass]]]] = {  # dtype of weights, recomputed layers, micro-batches
    "0.5B": [(torch.float32, False, (SHORT, GROUP, TWO_GROUPS))],
    "1.5B": [(torch.float32, False, (GROUP, TWO_GROUPS, SHORT)), (torch.bfloat16, False, (GROUP,))],
    "1.5B-long": [(torch.float32, True, (LONG,))],
    "8B": [(torch.bfloat16, False, (GROUP, TWO_GROUPS))],
}


def learner(target: Target, name: str) -> None:
    """Forward and backward, the optimizer's step and scoring, by a run's learner with the layers that it would use."""
    from support.algorithms import grpo

    size, algorithm = choose_size(name.partition("-")[0], target), grpo()
    for dtype, recomputed, passes in LEARNERS[name]:
        own, layers = make_learner(target, size, dtype, recomputed)
        for each in (TINY_PASS,) if target.tiny else passes:
            try:
                _learner_row(target, f"{name}, {layers}", size, own, each, algorithm)
            except Exception as error:  # such as no memory left: the next one may do
                write_row(f"learner {name}, {layers}, {each}", f"failed: {describe_error(error)}", ok=False)
                own.model.zero_grad(set_to_none=True)
        del own
        if target.device == "cuda":
            torch.cuda.empty_cache()


def make_learner(target: Target, size: ModelSize, dtype: torch.dtype, recomputed: bool = False) -> tuple[Any, str]:
    """Return a run's learner, and a description of its layers."""
    from strop.models.network import Network
    from strop.sampling import Sampling
    from support.learners import make_torch_learner

    network = Network(build_model(size, target.device, dtype), precision=torch.bfloat16, packed=True)
    learner = make_torch_learner(
        network,
        Sampling(),
        train_tokens=10**9,
        score_tokens=10**9,
        compile_layers="auto" if target.device != "cpu" else True,
        activation_checkpointing=recomputed,
    )
    compiled = "compiled" if network.compiled_layers is not None else "not compiled"
    return learner, f"{str(dtype).removeprefix('torch.')} weights, {compiled}" + (", layers recomputed" if recomputed else "")


def _learner_row(target: Target, name: str, size: ModelSize, learner: Any, shape: Pass, algorithm: Any) -> None:
    batch = make_batch(shape.prompt, shape.completions, size.vocabulary, algorithm, groups=shape.groups)
    target.take_peak()
    seconds = time_calls(target, lambda: learner.forward_backward(batch, algorithm.loss))
    learner.step()  # makes the optimizer's state; without gradients the next one would do nothing
    learner.forward_backward(batch, algorithm.loss)
    step = time_calls(target, learner.step, most=1, warm=0)
    peak = target.take_peak()
    scoring = time_calls(target, lambda: learner.score(batch), most=2, warm=1)
    pairs = tree_pairs(batch.segment_length.tolist(), batch.segment_parent.tolist())
    flops = 6.0 * (size.layer_weights * len(batch.tokens) + size.head_weights * len(batch.target))
    rate = (flops + 12.0 * size.layers * size.heads * size.head_size * pairs) / seconds / 1e12
    mfu = rate / find_peak(target)
    write_row(
        f"learner {name}, {shape} = {len(batch.tokens):,} tokens",
        f"{1000 * seconds:.0f} ms, " + (f"{rate:.0f} TFLOP/s, MFU {mfu:.1%}" if mfu else f"{1000 * rate:.0f} GFLOP/s"),
        f"{len(batch.tokens) / seconds:,.0f} tokens/s, step {1000 * step:.1f} ms, scoring {1000 * scoring:.0f} ms {peak}",
        seconds=seconds,
        tflops=rate,
        mfu=mfu,
        step=step,
        scoring=scoring,
    )


def find_peak(target: Target) -> float:
    """Return the vendor's TFLOP/s; infinity where they are not known."""
    device = torch.cuda.get_device_name() if target.device == "cuda" else "another"
    return next((rate for name, rate in PEAK_TFLOPS.items() if name in device), float("inf"))


def profile(target: Target) -> None:
    """One micro-batch of 1.5B, kernel by kernel."""
    from support.algorithms import grpo

    size, algorithm, shape = choose_size("1.5B", target), grpo(), TINY_PASS if target.tiny else GROUP
    learner, layers = make_learner(target, size, torch.float32)
    batch = make_batch(shape.prompt, shape.completions, size.vocabulary, algorithm, groups=shape.groups)
    for _ in range(3):
        learner.forward_backward(batch, algorithm.loss)
    target.synchronize()
    started = time.perf_counter()
    with torch.profiler.profile() as found:
        learner.forward_backward(batch, algorithm.loss)
        target.synchronize()
    clock = 1000 * (time.perf_counter() - started)
    on_gpu = target.device == "cuda"
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages = found.key_averages()
    (target.out / "profile.txt").write_text(averages.table(sort_by=field, row_limit=100, max_name_column_width=100))
    events = [each for each in averages if getattr(each, field) > 0 and (not on_gpu or "CUDA" in str(each.device_type))]
    spent, launches = sum(getattr(each, field) for each in events) / 1000, sum(each.count for each in events)
    found_of = f"{number(spent)} ms in {launches:,} launches"
    write_row(f"profile, 1.5B, {layers}, {shape}", found_of, f"of {clock:.0f} ms by the clock")
    for each in sorted(events, key=lambda each: -getattr(each, field))[:KERNELS_LISTED]:
        milliseconds = getattr(each, field) / 1000
        write_row(f"`{each.key:.90}`", f"{milliseconds:.2f} ms", f"{each.count} times", milliseconds=milliseconds)


def offload(target: Target) -> None:
    """A learner of 1.5B leaves the device and comes back. The first time its memory on the host is pinned."""
    from strop.learner.torch.tensor_offload import ModelOffload
    from support.algorithms import grpo

    size, algorithm = choose_size("1.5B", target), grpo()
    learner, _ = make_learner(target, size, torch.float32)
    learner.forward_backward(make_batch(8, (8, 8), size.vocabulary, algorithm), algorithm.loss)
    learner.step()
    moving = ModelOffload([learner.state_offload, learner.weight_offload])
    for turn in ("first", "second"):
        held, seconds = target.allocated(), []
        for move in (moving.offload, moving.onload):
            started = time.perf_counter()
            move()
            target.synchronize()
            seconds.append(time.perf_counter() - started)
        found = f"{number(seconds[0])} s to the host, {number(seconds[1])} s back"
        write_row(f"offload of 1.5B with AdamW, {turn} time", found, f"{held / 1e9:.1f} GB", leave=seconds[0], back=seconds[1])


def fingerprints(target: Target) -> None:
    from strop.weight_sync.fingerprints import fingerprint

    weights = [each.detach() for each in build_model(choose_size("1.5B", target), target.device, torch.bfloat16).parameters()]
    size = sum(each.nbytes for each in weights)
    held = target.allocated()
    target.take_peak()
    seconds = time_calls(target, lambda: [fingerprint(each) for each in weights], most=3)
    beside = (torch.cuda.max_memory_allocated() - held) / 2**20 if target.device == "cuda" else 0.0
    write_row("fingerprints of 1.5B", f"{number(size / seconds / 1e9)} GB/s", f"{beside:.0f} MiB beside", seconds=seconds)


# --- publishing ------------------------------------------------------------------------------------------------------------


def publish(target: Target, transport: str) -> None:
    """Seconds until all of a model's tensors are in those of another process, by one of the transports of a run."""
    from strop.weight_sync.fingerprints import fingerprint
    from strop.weight_sync.transports.manifest import build_manifest, move_large_to_middle
    from strop.weight_sync.weight_source import local_weights

    sender = _make_sender(target, transport)
    if sender is None:
        return
    model = build_model(choose_size("1.5B", target), target.device, torch.bfloat16)
    named = [(name, each.detach()) for name, each in model.named_parameters()]
    ordered = [(weight.name, weight.spec) for weight in move_large_to_middle(local_weights(named))]
    manifest = build_manifest(ordered, torch.bfloat16)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    device = {"nccl": "cuda:1"}.get(transport, "cuda:0" if target.device == "cuda" else target.device)
    process = context.Process(target=receive_weights, args=(theirs, sender.address, manifest, device), daemon=True)
    process.start()
    theirs.close()
    try:
        _await(ours)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            ours.send("next")
            sender.send(manifest, ordered)
            _await(ours)
            seconds.append(time.perf_counter() - started)
        ours.send(None)
        arrived = _await(ours)
        wrong = sum(arrived[name] != fingerprint(tensor) for name, tensor in ordered)
    finally:
        process.kill()
    later, size = median(seconds[1:]), manifest.nbytes
    write_row(
        f"publish of 1.5B to another process, {transport}",
        f"{number(later)} s" if not wrong else f"failed: {wrong} tensors are others",
        f"{size / 1e9:.1f} GB at {number(size / later / 1e9)} GB/s; the first {number(seconds[0])} s",
        ok=not wrong,
        seconds=later,
        first=seconds[0],
    )


def _make_sender(target: Target, transport: str) -> Any:
    """Return a sender to one process; None, with a row, where there is nothing to send through."""
    from strop.weight_sync.transports.broadcast import BroadcastSender
    from strop.weight_sync.transports.cuda_ipc import CudaIpcSender
    from strop.weight_sync.transports.host_memory import MemorySender

    gpu = torch.device("cuda", 0)
    gpus = torch.cuda.device_count() if target.device == "cuda" else 0
    if gpus < GPUS_NEEDED.get(transport, 0):
        write_row(f"publish by {transport}", f"not run: it needs {GPUS_NEEDED[transport]} GPUs")
        return None
    return {
        "cuda_ipc": lambda: CudaIpcSender(1, device=gpu, timeout=ANSWER_SECONDS),
        "memory": lambda: MemorySender(1, timeout=ANSWER_SECONDS),
        "gloo": lambda: BroadcastSender(1, timeout=ANSWER_SECONDS),
        "nccl": lambda: BroadcastSender(1, backend="nccl", device=gpu, timeout=ANSWER_SECONDS),
    }[transport]()


def _await(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"the process that receives weights has not answered for {ANSWER_SECONDS:.0f} s")
    return pipe.recv()


def receive_weights(pipe: Connection, address: Any, manifest: Any, name: str) -> None:
    """The other process: an engine's parameters, into which each publish is copied. Answers the last time with their fingerprints."""
    from strop.weight_sync.fingerprints import fingerprint

    prepare_device(name)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = {entry.name: torch.zeros(entry.shape, dtype=entry.dtype, device=device) for entry in manifest.entries}
    receiver = address.connect(0, device)
    pipe.send("ready")
    while pipe.recv() is not None:
        for name, tensor in receiver.receive(manifest):
            own[name].copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pipe.send("received")
    pipe.send({name: fingerprint(tensor) for name, tensor in own.items()})
    pipe.recv()  # until it is killed


# --- decoding --------------------------------------------------------------------------------------------------------------


def decoding(target: Target) -> None:
    """Tokens a second of the embedded engine with 1.5B: as a run's defaults make it, and with slots for just these sequences."""
    from strop.generation.torch.torch_config import TorchGenerationConfig
    from strop.generation.torch.torch_engine import make_runner as make_default_runner
    from strop.models.network import Network
    from support.torch_engine import make_runner

    size = choose_size("1.5B", target)
    network = Network(build_model(size, target.device, torch.bfloat16), precision=torch.bfloat16, packed=True)
    prompt, new, lengths, counts = (8, 8, (64,), (4,)) if target.tiny else (128, 192, (2048, 4096), (64, 256))
    default = TorchGenerationConfig(**{"kv_cache_memory_gb": 0.01} if target.tiny else {})
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[list[int]]:
        return torch.randint(4, size.vocabulary, (count, prompt), generator=generator).tolist()

    for length in lengths:
        runner: Any = make_default_runner(network, default, length=length)
        _decoding_row(target, f"by default for {length:,} tokens", runner, partial(draw, counts[0]), new)
    for count in counts:
        slot = prompt + new + 8
        runner = make_runner(network, slots=count, length=slot, prefix_tokens=count * (prompt + 16), cuda_graphs=True)
        _decoding_row(target, f"slots of {slot} tokens", runner, partial(draw, count), new)


def _decoding_row(target: Target, name: str, runner: Any, draw: Callable[[], list[list[int]]], new: int) -> None:
    """``draw``: new prompts each time, none of which is in the prefix cache."""
    from strop.sampling import Sampling
    from support.torch_engine import Request, make_engine, run_requests

    def seconds_for(length: int) -> float:
        asked = [Request(tokens, Sampling(max_new_tokens=length), seed) for seed, tokens in enumerate(draw())]
        started = time.perf_counter()
        run_requests(make_engine(runner), asked)
        target.synchronize()
        return time.perf_counter() - started

    target.take_peak()
    first, prefill, whole = seconds_for(4), seconds_for(1), seconds_for(new)
    step, count = (whole - prefill) / (new - 1), len(draw())
    write_row(
        f"embedded engine, 1.5B, {count} sequences, {name}",
        f"{count / step:,.0f} tokens/s",
        f"{1000 * step:.2f} ms a step; prefill {prefill:.2f} s, the first time {first:.1f} s {target.take_peak()}",
        tokens_per_second=count / step,
        seconds=step,
    )
