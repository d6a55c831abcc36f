"""Time and memory of log-probabilities over the vocabulary, forward and backward, beside those of another checkout.

    python benchmarks/lm_head.py                                  # 1,300 rows, SmolLM2-135M's vocabulary, float32 and bfloat16
    python benchmarks/lm_head.py --against ../old-checkout --wide # 4,096 rows, a vocabulary of 151,936

Each checkout has a process of its own, which imports its own ``strop``; they take turns (A B, B A, ...), and a ratio is that of
neighbours. bfloat16 is autocast over float32 weights, as in training. ``products`` are the four matrix products that forward and backward
cannot do without when the logits are computed again (three where they are kept), in the same tiles as today's code: the floor. Memory
is the largest resident set of one forward and backward, over what was there before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Spread, memory, number, reset_peak_memory, spread, table, use_threads

SHAPES = {"usual": (1300, 49152, 576), "wide": (4096, 151_936, 896)}


@dataclass(frozen=True)
class Row:
    """One shape in one dtype; seconds, MiB, and old / new where there is another checkout."""

    shape: str
    dtype: str
    part: str  # "forward" or "forward, backward"
    seconds: dict[str, Spread]
    memory: dict[str, float]
    ratio: Spread | None


class Checkout:
    """The other end of ``serve``: one checkout of Strop in its own process."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        command = [sys.executable, __file__, "--serve"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a checkout's process ended without an answer; see its error above")
        return json.loads(line)


def serve() -> None:
    """Answer requests on the standard input: prepare a shape, time one pass, measure its memory, or time the products."""
    workload: Workload | None = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "prepare":
            workload, answer = Workload(*arguments), 0.0
        else:
            assert workload is not None
            answer = getattr(workload, name)(*arguments)
        print(json.dumps(answer), flush=True)


class Workload:
    """One shape in one dtype, in this process."""

    def __init__(self, rows: int, vocabulary: int, width: int, dtype: str, threads: int) -> None:
        import torch

        from strop.learner.budget.device_memory import reuse_freed_memory

        reuse_freed_memory()
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        self.torch = torch
        self.dtype = getattr(torch, dtype)
        self.hidden = torch.randn(rows, width, generator=generator).to(self.dtype).requires_grad_()
        self.weight = torch.randn(vocabulary, width, generator=generator).mul_(0.05).requires_grad_()
        self.target = torch.randint(vocabulary, (rows,), generator=generator)
        self.slopes = torch.randn(rows, generator=generator) / rows
        self.compute = _import_token_logprobs()

    def seconds(self, backward: bool) -> float:
        """Return the seconds of one pass."""
        started = time.perf_counter()
        self._run(backward)
        return time.perf_counter() - started

    def peak(self, backward: bool) -> float:
        """Return the MiB that one pass adds to the resident set at its largest."""
        from strop.learner.budget.device_memory import trim_freed_memory

        self.hidden.grad = self.weight.grad = None
        trim_freed_memory()
        reset_peak_memory()
        before = memory("VmRSS")
        self._run(backward)
        return memory("VmHWM") - before

    def products(self, backward: bool) -> float:
        """Return the seconds of the products alone, in tiles of 512 x 2048: one forward, and three of a backward pass."""
        torch = self.torch
        hidden, weight = self.hidden.detach(), self.weight.detach().to(self.dtype)
        started = time.perf_counter()
        for columns in weight.split(2048):
            for rows in hidden.split(512):
                tile = rows @ columns.t()
                if backward:
                    torch.mm(rows, columns.t(), out=tile)
                    tile @ columns, tile.t() @ rows
        return time.perf_counter() - started

    def _run(self, backward: bool) -> None:
        torch = self.torch
        with torch.set_grad_enabled(backward), torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            outputs = self.compute(self.hidden, self.target, self.weight)
        if backward:
            (outputs.logprobs * self.slopes).sum().backward()
            self.hidden.grad = self.weight.grad = None


def _import_token_logprobs() -> Callable[..., Any]:
    """Return the function of the checkout that this process imports, whose modules had other names once."""
    from strop.sampling import Sampling

    try:
        from strop.models.logprobs.lm_head import LMHead
        from strop.models.logprobs.token_logprobs import token_logprobs
    except ImportError:
        from strop.models.logprobs.lm_head import LMHead  # type: ignore[no-redef,import-not-found]
        from strop.models.logprobs.token_logprobs import token_logprobs  # type: ignore[no-redef,import-not-found]
    return lambda hidden, target, weight: token_logprobs(hidden, target, LMHead(weight, None), Sampling(), 1024)


def measure(sides: dict[str, Checkout], name: str, dtype: str, options: argparse.Namespace) -> list[Row]:
    for side in sides.values():
        side.ask("prepare", *SHAPES[name], dtype, options.threads)
    found = []
    for part, backward in (("forward", False), ("forward, backward", True)):
        for side in sides.values():
            side.ask("seconds", backward)
        seconds: dict[str, list[float]] = {side: [] for side in (*sides, "products")}
        for turn in range(options.repeats):
            for side in list(sides) if turn % 2 else list(reversed(sides)):
                seconds[side].append(sides[side].ask("seconds", backward))
            seconds["products"].append(sides["new"].ask("products", backward))
        pairs = zip(seconds["old"], seconds["new"], strict=True) if "old" in sides else ()
        ratios = [old / new for old, new in pairs]
        peaks = {side: each.ask("peak", backward) for side, each in sides.items()}
        spreads = {side: spread(each) for side, each in seconds.items()}
        found.append(Row(name, dtype, part, spreads, peaks, spread(ratios) if ratios else None))
    return found


def report(rows: Sequence[Row]) -> str:
    sides = [side for side in ("old", "new", "products") if side in rows[0].seconds]
    header = ["", *(f"{side}, s" for side in sides), "old / new", *(f"{side}, MiB" for side in rows[0].memory)]
    lines = []
    for row in rows:
        cells = [str(row.seconds[side]) for side in sides] + ["" if row.ratio is None else str(row.ratio)]
        lines.append([f"{row.shape}, {row.dtype}, {row.part}", *cells, *(number(row.memory[side]) for side in row.memory)])
    return table(header, lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of Strop, measured in alternation")
    parser.add_argument("--wide", action="store_true", help="only the wide shape, 4,096 x 151,936 x 896: minutes on a CPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=7, help="passes of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements to this file")
    parser.add_argument("--rows", type=int, help="rows instead of the shape's")
    parser.add_argument("--vocabulary", type=int, help="vocabulary instead of the shape's")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.serve:
        serve()
        return 0
    use_threads(options.threads)
    name = "wide" if options.wide else "usual"
    rows, vocabulary, width = SHAPES[name]
    SHAPES[name] = (options.rows or rows, options.vocabulary or vocabulary, width)
    sides = {"old": Checkout(options.against)} if options.against else {}
    sides["new"] = Checkout(Path(__file__).parents[1])
    print(f"{SHAPES[name][0]} rows, vocabulary {SHAPES[name][1]}, width {width}, {options.threads} threads", flush=True)
    found = []
    for dtype in ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,):
        found += measure(sides, name, dtype, options)
    print(report(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
