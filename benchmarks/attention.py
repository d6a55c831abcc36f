"""Attention over a prefix tree: time and memory of each kernel against products padded to the longest sibling.

    python benchmarks/attention.py speed --lengths 64 512 4096 --json results.json
    python benchmarks/attention.py memory --lengths 1024 2048 4096 8192
    python benchmarks/attention.py long

``speed``: forward and backward of one layer, the kernels in turn in one process; a ratio is that of two neighbouring runs. ``memory``:
the peak resident set of a process of its own for each length. ``long``: a forward and backward pass of a tiny model over long completions;
16 of 16k tokens on a prompt of 2k with ``--completions 16 --lengths 16384 --dtypes float32``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

Clock = Callable[[], float]
DTYPES = ("float32", "bfloat16")
KERNELS = ("plain", "flash", "blockwise")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Completions of one prompt: their lengths are spread evenly from half of the longest to the longest."""

    prompt: int
    completions: int
    longest: int

    @property
    def lengths(self) -> list[int]:
        half = self.longest / 2
        return [round(half + half * (place + 1) / self.completions) for place in range(self.completions)]

    def plan(self, kernel: str) -> Any:
        import torch

        from strop.models.attention.tree_plan import TreePlan

        lengths = torch.tensor([self.prompt, *self.lengths])
        parents = torch.tensor([-1, *[0] * self.completions])
        return TreePlan(lengths.cumsum(0) - lengths, lengths, parents, torch.device("cpu"), kernel)  # type: ignore[arg-type]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer's heads."""

    heads: int = 9  # SmolLM2-135M
    kv_heads: int = 3
    size: int = 64


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a kernel's forward and backward pass, and how many times the first kernel's they are, pair by pair."""

    longest: int
    dtype: str
    kernel: str
    seconds: Sequence[float]
    ratios: Sequence[float]


def run_once(tree: Tree, shape: Shape, dtype: str, kernel: str, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of a forward and a backward pass by a clock."""
    import torch

    from strop.models.attention.attention_plan import AttentionSpec

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    rows = [torch.randn(tree.tokens, count, shape.size, generator=generator).to(kind).requires_grad_() for count in heads]
    grad = torch.randn(tree.tokens, shape.heads, shape.size, generator=generator).to(kind)
    plan = tree.plan(kernel)
    start = clock()
    plan.attend(*rows, AttentionSpec(0, shape.size**-0.5)).backward(grad)
    return clock() - start


def measure_speed(
    tree: Tree, shape: Shape, dtype: str, kernels: Sequence[str], seconds: float, clock: Clock = time.perf_counter
) -> list[Timing]:
    """Run the kernels in turn for about so many seconds, after one round that does not count."""
    taken: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for kernel in kernels:
        run_once(tree, shape, dtype, kernel)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[kernels[-1]]) < 3:
        for kernel in kernels:
            taken[kernel].append(run_once(tree, shape, dtype, kernel, clock))
    base = taken[kernels[0]]
    return [
        Timing(
            longest=tree.longest,
            dtype=dtype,
            kernel=kernel,
            seconds=taken[kernel],
            ratios=[one / other for one, other in zip(base, taken[kernel], strict=True)],
        )
        for kernel in kernels
    ]


def speed(options: argparse.Namespace) -> list[Timing]:
    timings = []
    clock = time.perf_counter
    if options.cpu_time:
        import torch

        torch.set_num_threads(1)
        clock = time.process_time
    for longest in options.lengths:
        tree = Tree(prompt=max(32, longest // 4), completions=options.completions, longest=longest)
        for dtype in options.dtypes:
            found = measure_speed(tree, Shape(), dtype, options.kernels, options.seconds, clock)
            timings += found
            for timing in found:
                ratios = f"{median(timing.ratios):.2f} ({min(timing.ratios):.2f} to {max(timing.ratios):.2f})"
                print(
                    f"| {longest} | {dtype} | {timing.kernel} | {median(timing.seconds) * 1000:.1f} ms | {ratios} |", flush=True
                )
    return timings


def peak_memory(tree: Tree, dtype: str, kernel: str) -> float:
    """Return by how many MiB the peak resident set of a process grows in a forward and backward pass."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (tree, dtype, kernel))


def _grow(tree: Tree, dtype: str, kernel: str) -> float:
    import torch

    torch.set_num_threads(1)
    run_once(Tree(prompt=8, completions=2, longest=8), Shape(), dtype, kernel)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_once(tree, Shape(), dtype, kernel)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for longest in options.lengths:
        for dtype in options.dtypes:
            for kernel in options.kernels:
                tree = Tree(prompt=max(32, longest // 4), completions=options.completions, longest=longest)
                grown = peak_memory(tree, dtype, kernel)
                print(
                    f"| {longest} | {tree.tokens} | {dtype} | {kernel} | {grown:.0f} MiB | {grown * 1024 / tree.tokens:.1f} KiB |",
                    flush=True,
                )
                found.append({"longest": longest, "tokens": tree.tokens, "dtype": dtype, "kernel": kernel, "mebibytes": grown})
    return found


def long(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A pass of a tiny Llama over a group of long completions."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from strop.models.network import Network

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    torch.manual_seed(0)
    network = Network(AutoModelForCausalLM.from_config(config), packed=True)
    longest = max(options.lengths)
    lengths = torch.tensor([longest // 8, *[longest] * options.completions])
    parents = torch.tensor([-1, *[0] * options.completions])
    positions = torch.cat(
        [torch.arange(longest // 8), torch.arange(longest // 8, longest // 8 + longest).repeat(options.completions)]
    )
    from strop.models.attention.tree_plan import TreePlan

    plan = TreePlan(lengths.cumsum(0) - lengths, lengths, parents, network.device)
    tokens = torch.randint(256, (1, int(lengths.sum())))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtypes[0] == "bfloat16"):
        hidden = network.decoder(tokens, position_ids=positions[None], plan=plan, use_cache=False).last_hidden_state
    forward = time.perf_counter() - start
    hidden.float().square().mean().backward()
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{len(positions)} tokens, {options.dtypes[0]}: {forward:.0f} s forward, {seconds:.0f} s in all, {grown:.0f} MiB")
    return [{"tokens": len(positions), "dtype": options.dtypes[0], "seconds": seconds, "mebibytes": grown}]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory", "long"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], help="of the longest completion (tokens)")
    parser.add_argument(
        "--completions", type=int, default=8, help="of the prompt, which has a quarter of the tokens of the longest one"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=(*KERNELS, "flex", "auto"))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each length and dtype")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread and its own seconds: what a busy machine disturbs least"
    )
    parser.add_argument("--json", type=Path, help="where to write every measurement")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    measures: dict[str, Callable[[argparse.Namespace], list[Any]]] = {"speed": speed, "memory": memory, "long": long}
    found = measures[options.what](options)
    if options.json is not None:
        rows = [asdict(row) if isinstance(row, Timing) else row for row in found]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
