"""Forward and backward pass of the decoder's layers: the modules of Transformers against the fused passes of the learner, in alternation.

    python benchmarks/learner_layers.py                              # SmolLM2-135M, float32 and bfloat16, 2 threads
    python benchmarks/learner_layers.py --dtype bfloat16 --pairs 10 --checkpointing 0.5
    python benchmarks/learner_layers.py --host [--pairs 20]          # 28 layers with nothing to compute, 1 thread

Both read the same made-up tree of prompts and completions with the same weights in one process, without the output layer. Pairs of passes
run A B, B A, ...; a ratio is that of neighbours. The share is of the rate of the same matrix products alone (attention is not in its
FLOPs). The hidden states of both must be the same bits in float32.

``--host``: what a pass costs the host, in process time, beside Transformers' own eager pass over one sequence of as many tokens: 28
layers 32 wide, four completions of eight tokens after a prompt of eight. Weights are not reordered for oneDNN, which only a CPU does.
A second table leaves attention out of all sides: a GPU takes another kernel than a CPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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


def measure_host(dtype: str, pairs: int, kernel: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from strop.learner.torch.layer_compilation import choose_layer_compilation
    from strop.models.attention.tree_plan import TreePlan
    from strop.models.layers import weight_copies
    from strop.models.layers.compiled_layers import use_learner_layers
    from strop.models.network import Network

    torch.set_num_threads(1)
    weight_copies._can_pack = lambda device, dtype: False  # type: ignore[assignment]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 28, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    batch, precision = make_batch(512, 1, 4, 8, 8), getattr(torch, dtype)
    networks = {side: Network(LlamaForCausalLM(config), precision=precision, packed=True) for side in ("as written", "compiled")}
    for network in networks.values():
        network.attention_kernel = kernel
    choose_layer_compilation(networks["compiled"], True, "policy")
    theirs = LlamaForCausalLM(copy.deepcopy(config))
    theirs.set_attn_implementation("sdpa")
    tokens = batch.tokens[None]

    def run(side: str) -> float:
        network = networks.get(side)
        model = theirs if network is None else network.model
        model.zero_grad(set_to_none=True)
        started = time.process_time()
        if network is None:
            with torch.autocast("cpu", precision, enabled=dtype != "float32"):
                hidden = theirs.model(input_ids=tokens, use_cache=False).last_hidden_state
            hidden.sum().backward()
        else:
            with use_learner_layers(network, keep_copies=True):
                with network.autocast():
                    hidden = network.run_decoder(batch)
                hidden.sum().backward()
        return 1000 * (time.process_time() - started)

    def table_of(said: str) -> None:
        sides = ("Transformers", *networks)
        found: dict[str, list[float]] = {side: [] for side in sides}
        for pair in range(-3, pairs):
            for side in sides if pair % 2 == 0 else sides[::-1]:
                taken = run(side)
                if pair >= 0:
                    found[side].append(taken)
        rows = []
        for side in sides:
            ratios = spread(one / other for one, other in zip(found[side], found["Transformers"], strict=True))
            rows.append([side, str(spread(found[side])), number(min(found[side])), str(ratios)])
        print(f"{dtype}, {said}\n{table(['', 'ms', 'least', 'of Transformers'], rows)}\n", flush=True)

    table_of("as a run takes it")
    ALL_ATTENTION_FUNCTIONS.register("left out", lambda module, query, *_, **__: (query.transpose(1, 2) * 1.0, None))
    theirs.config._attn_implementation = "left out"
    with patch.object(TreePlan, "attend", lambda self, query, key, value, spec: query * 1.0):
        table_of("attention left out")


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
    parser.add_argument("--attention", default="auto", help="policy.attention_kernel, of --host")
    parser.add_argument("--host", action="store_true", help="what a pass costs the host")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    use_threads(1 if options.host else options.threads)
    if options.host:
        for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
            measure_host(dtype, options.pairs, options.attention)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model if Path(options.model).is_dir() else folder
        if model == folder:
            run_in_subprocess(prepare_model, options.model, folder)
        for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
            print(report(measure(model, dtype, options)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
