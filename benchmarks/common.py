"""What the benchmarks share: records of steps, statistics over them, counts of arithmetic, memory of a process. No torch here."""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Side = str  # "trl" or "strop"
SIDES: tuple[Side, Side] = ("trl", "strop")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of one side, as it measured itself. Times are seconds, memory is MiB."""

    side: Side
    step: int  # from 1, warm-up included
    seconds: float  # from taking the turn to handing it back
    generation: float  # prompts to scored completions, and what generating needs of new weights
    training: float  # log-probabilities, backward, clipping, optimizer
    phases: Mapping[str, float] = field(default_factory=dict)  # the same time, finer
    prompt_tokens: int  # each prompt counted once
    sampled_tokens: int
    tokens_read: int  # by the training forward pass, padding included
    head_rows: int  # rows that went through the output layer in training
    attention_pairs: int  # (query, key) pairs of one head and layer in training
    reward: float  # mean over the step's completions
    peak_memory: float  # of the process so far, since its model was loaded

    @property
    def distinct_tokens(self) -> int:
        """What there was to learn from: every prompt once, every completion."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def other(self) -> float:
        return self.seconds - self.generation - self.training


@dataclass(frozen=True)
class Spread:
    """A median between its extremes."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def order(pair: int) -> tuple[Side, Side]:
    """Who goes first in a pair of steps: A B, B A, A B, ... so that a machine that drifts favours neither."""
    return SIDES if pair % 2 == 0 else (SIDES[1], SIDES[0])


def pair_ratios(
    trl: Sequence[StepRecord], strop: Sequence[StepRecord], measure: Callable[[StepRecord], float], *, per_token: bool = False
) -> list[float]:
    """TRL over Strop, step i against step i. ``per_token`` divides each by its own distinct tokens first: sampled lengths differ."""
    if [record.step for record in trl] != [record.step for record in strop]:
        raise ValueError("the two sides did not take the same steps")

    def value(record: StepRecord) -> float:
        return measure(record) / (record.distinct_tokens if per_token else 1)

    return [value(a) / value(b) for a, b in zip(trl, strop, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that arithmetic depends on; a Llama-like decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of every matrix of one layer."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, (self.hidden, self.intermediate), (self.hidden, self.intermediate), (self.intermediate, self.hidden)]

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' matrices: everything that is neither embedding, output layer nor norm."""
        return self.layers * sum(rows * columns for rows, columns in self.linears)


def training_flops(shape: ModelShape, *, tokens_read: int, head_rows: int, attention_pairs: int) -> float:
    """Floating-point operations of forward and backward. A multiplication with addition counts 2, backward twice forward.

    The output layer counts 8 and not 6 a weight: both sides compute its logits again in the backward pass instead of keeping them.
    """
    layers = 6.0 * shape.layer_parameters * tokens_read
    head = 8.0 * shape.hidden * shape.vocabulary * head_rows
    attention = 3.0 * 4 * shape.layers * shape.heads * shape.head_size * attention_pairs
    return layers + head + attention


def tree_pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """(query, key) pairs of a forest of segments: own segment causally, ancestors whole."""
    pairs = 0
    for length, parent in zip(lengths, parents, strict=True):
        seen = 0
        while parent != -1:
            seen += lengths[parent]
            parent = parents[parent]
        pairs += length * seen + length * (length + 1) // 2
    return pairs


def padded_pairs(rows: int, length: int) -> int:
    """The same for padded rows under an explicit mask, where a kernel computes every pair."""
    return rows * length * length


# Substrings of torch's operator names, in the order in which they are tried. What a fused kernel contains counts where the kernel is.
OPERATORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("scaled_dot_product", "_flash_attention", "efficient_attention")),
    ("matrix products", ("addmm", "aten::mm", "bmm", "baddbmm", "_linear_pointwise", "mkldnn_linear", "aten::linear", "aten::matmul")),
    ("optimizer", ("adam", "_foreach", "clip_grad", "optimizer.")),
    ("reordering weights", ("_reorder_", "mkldnn_reorder")),
    ("casts and copies", ("copy_", "_to_copy", "aten::to", "clone", "contiguous", "aten::cat", "aten::stack")),
    ("gather and scatter", ("index", "gather", "scatter", "embedding")),
    ("softmax and reductions", ("softmax", "logsumexp", "aten::sum", "aten::mean", "vecdot", "aten::max", "amax", "norm", "exp")),
    ("elementwise", ("aten::mul", "aten::add", "aten::sub", "aten::div", "silu", "neg", "rsqrt", "pow", "sigmoid", "fill", "zero")),
)


def operator_kind(name: str) -> str:
    """What an operator of torch's profiler does, roughly."""
    lowered = name.lower()
    return next((kind for kind, parts in OPERATORS if any(part in lowered for part in parts)), "everything else")


def by_kind(self_seconds: Mapping[str, float]) -> dict[str, float]:
    """Operator -> own seconds, summed by kind, largest first."""
    found: dict[str, float] = {}
    for name, seconds in self_seconds.items():
        kind = operator_kind(name)
        found[kind] = found.get(kind, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one left-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def write(line: Sequence[str]) -> str:
        cells = [cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([write(lines[0]), "  ".join("-" * width for width in widths), *(write(line) for line in lines[1:])])


def reset_peak_memory() -> None:
    """Forget the peak so far, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def memory(key: str = "VmHWM") -> float:
    """MiB: VmHWM is the peak of the resident memory, VmRSS what is resident now."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))
    except (OSError, StopIteration):  # not Linux; the peak is the best there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
