"""Benchmark weight transports against a plain copy of the same bytes, and fingerprints against a hash and a copy.

    python benchmarks/weight_sync.py                                   # SmolLM2-135M's shapes, bfloat16 and float32, every transport
    python benchmarks/weight_sync.py --transports memory --gigabytes 4 --repeats 9 --json results.json

A publish is timed from telling the other process to receive until all of its own tensors (an engine's parameters) have their bytes. The
copy is ``copy_`` of every tensor, in sequence, within this process. Both move each byte from the learner's tensor to another one, so their
ratio is the cost of crossing processes. They alternate (A B, B A, ...), and each ratio compares neighbours. Destinations have been
written to before; the first publish is not counted. A publish uses two processes and a copy one, so two idle cores are needed. With
fingerprints, the sender fingerprints each tensor as it sends it, the receiver after copying it, and both are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import DISTURBED, Spread, machine_seconds, number, spread, table, use_threads, wait_for_quiet
from torch import Tensor

from strop.weight_sync.base import ChannelAddress, Manifest, Sender
from strop.weight_sync.fingerprints import fingerprint
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.manifest import build_manifest, move_large_to_middle
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.weight_source import local_weights

TRANSPORTS = ("memory", "gloo", "folder")
Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Pair:
    """One publish and one adjacent copy, in seconds."""

    publish: float
    copy: float
    foreign: float  # cores used by other processes during the pair

    @property
    def ratio(self) -> float:
        """Publish rate / copy rate."""
        return self.copy / self.publish


@dataclass(frozen=True)
class Measured:
    transport: str
    source: str
    dtype: str
    fingerprints: bool
    bytes: int
    pairs: tuple[Pair, ...]

    @property
    def rates(self) -> tuple[Spread, Spread]:
        """Rates of publish and copy in GB/s."""
        return spread(self.bytes / pair.publish / 1e9 for pair in self.pairs), spread(
            self.bytes / pair.copy / 1e9 for pair in self.pairs
        )

    def row(self) -> list[str]:
        ours, plain = self.rates
        what = self.dtype if self.source == self.dtype else f"{self.source} as {self.dtype}"
        ratios = spread(pair.ratio for pair in self.pairs)
        busy = max(pair.foreign for pair in self.pairs)
        return [self.transport, what, "yes" if self.fingerprints else "no", str(ours), str(plain), str(ratios), number(busy)]


def smol_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of SmolLM2-135M's tensors."""
    hidden, inner, keys = 576, 1536, 192
    yield "model.embed_tokens.weight", (49152, hidden)
    for layer in range(30):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{name}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{name}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def even_shapes(size: int, itemsize: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of 4096 x 4096 matrices, ``size`` bytes in total."""
    for index in range(max(1, size // (4096 * 4096 * itemsize))):
        yield f"layers.{index}.weight", (4096, 4096)


def make_weights(shapes: Iterator[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 20, generator=generator).to(dtype)
    return [
        (name, block.repeat(-(-torch.Size(shape).numel() // len(block)))[: torch.Size(shape).numel()].reshape(shape))
        for name, shape in shapes
    ]


def destinations(manifest: Manifest) -> dict[str, Tensor]:
    """Allocate destination tensors and write to them once, so that their memory is mapped."""
    return {entry.name: torch.full(entry.shape, 1, dtype=entry.dtype) for entry in manifest.entries}


# ---- the other process ----


def generator_process(pipe: Connection, address: ChannelAddress, manifest: Manifest, threads: int) -> None:
    """Copy received tensors into own tensors. Replies with (end time, fingerprints, CPU seconds so far)."""
    torch.set_num_threads(threads)
    own = destinations(manifest)
    receiver = address.connect(0, torch.device("cpu"))
    pipe.send("ready")
    while (proven := pipe.recv()) is not None:
        found = []
        for name, tensor in receiver.receive(manifest):
            own[name].copy_(tensor)
            if proven:
                found.append(fingerprint(own[name]))
        pipe.send((time.perf_counter(), found, time.process_time()))
    receiver.close()


@contextmanager
def generator(address: ChannelAddress, manifest: Manifest, threads: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=generator_process, args=(theirs, address, manifest, threads), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    try:
        yield ours
        ours.send(None)
        process.join(30)
    finally:
        process.kill()


# ---- this process ----


class AlternatingRuns:
    """Alternates publishes and copies of the same tensors."""

    def __init__(self, sender: Sender, pipe: Connection, manifest: Manifest, tensors: Named, proven: bool) -> None:
        self.sender, self.pipe, self.manifest, self.tensors, self.fingerprints = sender, pipe, manifest, tensors, proven
        self.copies = destinations(manifest)
        self.theirs = 0.0  # CPU seconds of the other process

    def publish(self) -> float:
        taken: list[int] = []

        def given() -> Iterator[tuple[str, Tensor]]:
            for (name, tensor), entry in zip(self.tensors, self.manifest.entries, strict=True):
                if self.fingerprints:
                    taken.append(fingerprint(tensor.to(entry.dtype)))
                yield name, tensor

        started = time.perf_counter()
        self.pipe.send(self.fingerprints)
        self.sender.send(self.manifest, given())
        ended, found, self.theirs = self.pipe.recv()
        assert found == taken, "the fingerprints differ"
        return ended - started  # one clock for all processes of the machine

    def copy(self) -> float:
        started = time.perf_counter()
        for name, tensor in self.tensors:
            self.copies[name].copy_(tensor)
        return time.perf_counter() - started

    def pairs(self, count: int, quiet: float) -> Iterator[Pair]:
        self.publish(), self.copy()  # warm-up: maps the memory
        for index in range(count):
            wait_for_quiet(quiet) if quiet else None
            busy, theirs, ours, started = machine_seconds(), self.theirs, time.process_time(), time.perf_counter()
            seconds = {"publish": 0.0, "copy": 0.0}
            for what in ("publish", "copy") if index % 2 == 0 else ("copy", "publish"):
                seconds[what] = getattr(self, what)()
            own = self.theirs - theirs + time.process_time() - ours
            foreign = max(0.0, machine_seconds() - busy - own) / (time.perf_counter() - started)
            yield Pair(seconds["publish"], seconds["copy"], foreign)


def make_sender(transport: str, options: argparse.Namespace, folder: str) -> Sender:
    size = {"bucket_size": int(options.bucket * 2**20)} if options.bucket else {}
    if transport == "memory":
        return MemorySender(1, slots=options.slots, **size) if options.slots else MemorySender(1, **size)
    return BroadcastSender(1, **size) if transport == "gloo" else FolderSender(Path(folder), 1)


def measure(transport: str, source: str, dtype: str, options: argparse.Namespace) -> Iterator[Measured]:
    kind = getattr(torch, source)
    shapes = even_shapes(int(options.gigabytes * 1e9), kind.itemsize) if options.gigabytes else smol_shapes()
    tensors = [(weight.name, weight.spec) for weight in move_large_to_middle(local_weights(make_weights(shapes, kind)))]
    manifest = build_manifest(tensors, getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        sender = make_sender(transport, options, folder)
        with generator(sender.address, manifest, options.threads) as pipe:
            for proven in (False, True):
                pairs = AlternatingRuns(sender, pipe, manifest, tensors, proven).pairs(options.repeats, options.wait_quiet)
                yield Measured(transport, source, dtype, proven, manifest.nbytes, tuple(pairs))
        sender.close()


# ---- fingerprints alone ----


def rate(function: Callable[[], object], size: int, repeats: int) -> list[float]:
    """Return the GB/s of each repetition."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        found.append(size / (time.perf_counter() - started) / 1e9)
    return found


def fingerprint_rows(repeats: int) -> Iterator[list[str]]:
    """Yield rows with the GB/s of fingerprint, xxh3 (if xxhash is installed) and copy, alternating, with one thread."""
    try:
        import xxhash
    except ImportError:
        xxhash = None
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((576, 576), (1536, 576), (49152, 576), (4096, 4096)):
            tensor = torch.randn(shape).to(dtype)
            target, raw = torch.empty_like(tensor), tensor.view(torch.uint8).numpy()
            functions: dict[str, Callable[[], object]] = {"fingerprint": lambda x=tensor: fingerprint(x)}
            functions["xxh3"] = (lambda x=raw: xxhash.xxh3_64_intdigest(x)) if xxhash else lambda: time.sleep(1e-3)
            functions["copy"] = lambda x=tensor, y=target: y.copy_(x)
            rates: dict[str, list[float]] = {name: [] for name in functions}
            for turn in range(repeats + 1):
                for name, function in functions.items():
                    rates[name] += rate(function, raw.size, 1) if turn else rate(function, raw.size, 1)[:0]
            ratios = spread(a / b for a, b in zip(rates["fingerprint"], rates["copy"], strict=True))
            cells = [str(spread(rates[name])) if name != "xxh3" or xxhash else "-" for name in functions]
            yield [f"{str(dtype).removeprefix('torch.')} {shape[0]} x {shape[1]}", *cells, str(ratios)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], help="of the tensors sent")
    parser.add_argument("--source", help="of the learner's tensors (default: the same)")
    parser.add_argument(
        "--gigabytes", type=float, default=0.0, help="4096 x 4096 matrices of this size instead of SmolLM2-135M's tensors"
    )
    parser.add_argument("--repeats", type=int, default=9, help="pairs of publish and copy")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--bucket", type=float, help="MiB (default: the transport's own)")
    parser.add_argument("--slots", type=int, help="buckets of the shared buffer (default: the transport's own)")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait before each pair for an idle machine")
    parser.add_argument("--no-fingerprints-alone", action="store_true", help="skip the table of fingerprints, hash and copy")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} measures nothing; set it to 1 or more")
    return options


def report(found: Sequence[Measured]) -> str:
    header = ["", "dtype", "fingerprints", "publish GB/s", "copy GB/s", "publish / copy", "foreign cores"]
    text = table(header, [measured.row() for measured in found])
    worst = max(pair.foreign for measured in found for pair in measured.pairs)
    if worst > DISTURBED:
        text += f"\nNOT A QUIET MACHINE: other processes used up to {worst:.1f} cores during a pair."
        quiet = [
            f"  {', '.join(measured.row()[:3])}: {spread(ratios)} over {len(ratios)} of {len(measured.pairs)}"
            for measured in found
            if (ratios := [pair.ratio for pair in measured.pairs if pair.foreign <= DISTURBED])
        ]
        text += "\nThe ratios of the pairs that nobody disturbed:\n" + "\n".join(quiet or ["  there are none"])
    return text


def main() -> None:
    options = parse()
    use_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads each; torch {torch.__version__}"
    )
    alone: list[list[str]] = []
    if not options.no_fingerprints_alone:
        alone = list(fingerprint_rows(options.repeats))
        print("\n" + table(["GB/s, one thread", "fingerprint", "xxh3", "copy", "fingerprint / copy"], alone), flush=True)
        torch.set_num_threads(options.threads)
    found: list[Measured] = []
    for transport in options.transports:
        for dtype in options.dtype:
            found += measure(transport, options.source or dtype, dtype, options)
            print(f"{transport} {dtype} done, {found[-1].bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)
    print("\nMedian (lowest to highest) of pairs:\n" + report(found))
    if options.json:
        results: dict[str, Any] = {"fingerprints": alone, "publishes": [asdict(measured) for measured in found]}
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
