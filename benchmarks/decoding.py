"""Tokens per second of the embedded engine on a CPU: decoding by the model's modules against the compiled kernels, in alternation.

    python benchmarks/decoding.py --model MODEL --threads 2 --json results.json

The bound of a step is the larger of two times: its products at the machine's matrix rate, and reading the weights and the cache once at its
bandwidth. Both are measured first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import MODEL, Spread, spread

from strop.generation.torch.model_runner import CachedRunner, SlotPrompt, infer_cache_shape
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.loading import load_model
from strop.models.network import Network

PROMPT = 60  # tokens
STEPS = 10  # of each turn; the first two are not counted
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DecodingRecord:
    """One row of the table. Times are in milliseconds a step."""

    dtype: str
    sequences: int
    modules: Spread
    kernels: Spread
    matrix_bound: float
    bandwidth_bound: float

    @property
    def ratio(self) -> float:
        return self.modules.median / self.kernels.median

    @property
    def share(self) -> float:
        return max(self.matrix_bound, self.bandwidth_bound) / self.kernels.median

    def __str__(self) -> str:
        binds = "matrix rate" if self.matrix_bound > self.bandwidth_bound else "bandwidth"
        speeds = " | ".join(f"{1e3 * self.sequences / side.median:.0f}" for side in (self.modules, self.kernels))
        return (
            f"| {self.dtype} | {self.sequences} | {self.modules} | {self.kernels} | {speeds} | {self.ratio:.2f} | "
            f"{self.share:.0%} ({binds}) |"
        )


def best_time(work: Callable[[], Any], repeats: int = 8) -> float:
    """Return the shortest time of some repetitions (seconds)."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def matrix_rate(dtype: torch.dtype, size: int = 1536) -> float:
    """Return the rate of a matrix product (FLOP/s)."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / best_time(lambda: left @ right)


def read_bandwidth(size: int = 1 << 27) -> float:
    """Return the rate of reading float32 numbers once (bytes/s)."""
    numbers = torch.ones(size)
    return 4 * size / best_time(numbers.sum)


def time_steps(runner: CachedRunner, sequences: int) -> list[float]:
    """Return the times of a few decoding steps after prompts of different tokens (milliseconds)."""
    runner.activate()
    runner.prefill([SlotPrompt(row, tuple(range(5 + row, 5 + row + PROMPT))) for row in range(sequences)])
    times = []
    for step in range(STEPS):
        start = time.perf_counter()
        runner.decode([7 + row for row in range(sequences)], [PROMPT + step] * sequences)
        times.append(1e3 * (time.perf_counter() - start))
    runner.deactivate()
    return times[2:]


def measure(network: Network, dtype: str, sequences: int, turns: int, rates: tuple[float, float]) -> DecodingRecord:
    memory = 64 * 256 * infer_cache_shape(network).bytes_per_token / 2**30
    runners = [
        CachedRunner(
            network,
            TorchGenerationConfig(kv_cache_memory_gb=memory, max_num_seqs=sequences, compiled_kernels=compiled),
            length=256,
        )
        for compiled in (False, True)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            times[side].append(median(time_steps(runners[side], sequences)))
    multiplied = sum(linear.weight.numel() for linear in network.model.modules() if isinstance(linear, torch.nn.Linear))
    cached = sequences * (PROMPT + STEPS // 2) * runners[0].shape.bytes_per_token
    rate, bandwidth = rates
    return DecodingRecord(
        dtype=dtype,
        sequences=sequences,
        modules=spread(times[0]),
        kernels=spread(times[1]),
        matrix_bound=1e3 * 2 * multiplied * sequences / rate,
        bandwidth_bound=1e3 * (multiplied * DTYPES[dtype].itemsize + cached) / bandwidth,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model)
    bandwidth = read_bandwidth()
    records = []
    print(f"reads {bandwidth / 1e9:.0f} GB/s")
    print("| dtype | sequences | modules, ms a step | kernels, ms a step | tokens/s | tokens/s | ratio | share of the bound |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype, precision in DTYPES.items():
        rate = matrix_rate(precision)
        for sequences in arguments.sequences:
            network = Network(model, precision=precision, packed=True)
            records.append(measure(network, dtype, sequences, arguments.turns, (rate, bandwidth)))
            print(records[-1], flush=True)
        print(f"{dtype}: products at {rate / 1e9:.0f} GFLOP/s")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(record) for record in records], indent=1))


if __name__ == "__main__":
    main()
