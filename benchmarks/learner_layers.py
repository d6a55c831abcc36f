"""Forward and backward pass of the decoder's layers: the modules of Transformers against the fused passes of the learner, in alternation.

    python benchmarks/learner_layers.py                              # SmolLM2-135M, float32 and bfloat16, 2 threads
    python benchmarks/learner_layers.py --dtype bfloat16 --pairs 10 --checkpointing 0.5

Both read the same made-up tree of prompts and completions with the same weights in one process, without the output layer. Pairs of passes
run A B, B A, ...; a ratio is that of neighbours. The share is of the rate of the same matrix products alone (attention is not in its
FLOPs). The hidden states of both must be the same bits in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).resolve().parent)]

from common import MODEL, Spread, number, prepare_model, run_in_subprocess, spread, table, use_threads  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from strop.types import Batch

SIDES = ("modules", "fused")


@dataclass(frozen=True)
class Measurement:
    """One dtype."""

    dtype: str
    seconds: dict[str, Spread]
    ratio: Spread  # modules / fused
    difference: float  # of the hidden states, relative to the largest
    gflop: float  # of the linear layers
    rate: float  # GFLOP/s of their products alone


def make_batch(vocabulary: int, groups: int, completions: int, prompt: int, longest: int) -> Batch:
    """Build ``groups`` prompts with ``completions`` each, of a quarter of ``longest`` to ``longest`` tokens."""
    import torch

    from strop.models.network import probe_batch

    generator = torch.Generator().manual_seed(0)
    starts, parents, leaves, positions, total = [], [], [], [], 0
    for _ in range(groups):
        root = len(starts)
        for child in range(completions + 1):
            length = prompt if child == 0 else int(torch.randint(longest // 4, longest + 1, (1,), generator=generator))
            starts.append(total)
            parents.append(-1 if child == 0 else root)
            leaves += [] if child == 0 else [len(starts) - 1]
            positions.append(torch.arange(length) + (0 if child == 0 else prompt))
            total += length
    rows, rollouts = torch.arange(total), len(leaves)
    column = torch.zeros(total)
    return replace(
        probe_batch(vocabulary),
        tokens=torch.randint(vocabulary, (total,), generator=generator),
        positions=torch.cat(positions),
        segment_start=torch.tensor(starts),
        segment_parent=torch.tensor(parents),
        source=rows,
        target=rows % vocabulary,
        sequence=torch.zeros(total, dtype=torch.int64),
        leaf=torch.tensor(leaves),
        group=torch.arange(rollouts) // completions,
        rewards=torch.zeros(rollouts, dtype=torch.float64),
        rollout_logprobs=column,
        versions=torch.zeros(total, dtype=torch.int32),
        advantages=column,
        mask=column,
    )


def measure(folder: str, dtype: str, options: argparse.Namespace) -> Measurement:
    import torch

    from strop.learner.budget.device_memory import reuse_freed_memory
    from strop.learner.torch.tensor_offload import checkpoint_layers
    from strop.models.layers.known_code import decoder_layers
    from strop.models.loading import load_model
    from strop.models.network import Network

    torch.set_num_threads(options.threads)
    reuse_freed_memory()
    model = load_model(folder)
    network = Network(model, precision=getattr(torch, dtype), packed=True)
    model.train(options.checkpointing > 0)
    checkpoint_layers(model, decoder_layers(network.decoder), options.checkpointing)
    batch = make_batch(int(model.config.vocab_size), 4, 8, 45, 64)

    def run(side: str) -> tuple[float, Tensor]:
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        with network.fused_layers.use(keep_copies=True) if side == "fused" else nullcontext():
            with network.autocast():
                hidden = network.hidden(batch)
            hidden.backward(torch.full_like(hidden, 1e-3))
        return time.perf_counter() - started, hidden.detach()

    states = {side: run(side)[1] for side in SIDES}
    difference = float((states["fused"] - states["modules"]).abs().max() / states["modules"].abs().max())
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for pair in range(options.pairs):
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            found[side].append(run(side)[0])
    linears = [module for module in network.decoder.modules() if type(module) is torch.nn.Linear]
    shapes = [(len(batch.tokens), module.in_features, module.out_features) for module in linears]
    gflop = sum(6.0 * rows * width * out for rows, width, out in shapes) / 1e9
    seconds = sum(shapes.count(shape) * product_seconds(*shape, getattr(torch, dtype)) for shape in set(shapes))
    ratio = spread(old / new for old, new in zip(found["modules"], found["fused"], strict=True))
    return Measurement(dtype, {side: spread(found[side]) for side in SIDES}, ratio, difference, gflop, gflop / seconds)


def product_seconds(rows: int, width: int, out: int, dtype: Any) -> float:
    """Return the seconds of a linear layer's three products: its output, and the gradients of its input and its weight."""
    import torch

    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (out, width), (rows, out)))
    total = 0.0
    for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
        timings = []
        for _ in range(6):
            started = time.perf_counter()
            left @ right
            timings.append(time.perf_counter() - started)
        total += min(timings)
    return total


def report(found: Measurement) -> str:
    rows = [
        [side, str(seconds), number(found.gflop / seconds.median), f"{found.gflop / seconds.median / found.rate:.0%}"]
        for side, seconds in found.seconds.items()
    ]
    head = (
        f"{found.dtype}: {number(found.gflop)} GFLOP of linear layers; their products alone run at {number(found.rate)} GFLOP/s"
    )
    text = table(["", "seconds", "GFLOP/s", "share of that rate"], rows)
    return f"{head}\n{text}\nmodules / fused: {found.ratio}; hidden states differ by {found.difference:.1e} of the largest"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--checkpointing", type=float, default=0.0, help="share of the layers that recompute their activations")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    use_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model if Path(options.model).is_dir() else folder
        if model == folder:
            run_in_subprocess(prepare_model, options.model, folder)
        for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
            print(report(measure(model, dtype, options)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
