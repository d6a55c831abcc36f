"""Compiled kernels for decoding on a CPU: ``decode_kernels.cpp``, built once on each machine with g++.

The library is stored in the user's cache folder under the hash of its source, the compiler and the kind of processor, so that a
new version of Strop or another machine builds its own. It uses the threads of torch's own OpenMP runtime, because a second pool
of threads would compete for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.monitoring.process_profile import RECORDER
from strop.storage.files import user_cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-w")
BUILD_SECONDS = 300
SMALLEST_BLOCK = 64
FLOAT32_BLOCK = 2048  # inputs per block, so that a block's part of a panel stays in the L2 cache
DTYPES = (torch.float32, torch.bfloat16)


class KernelsUnavailable(Exception):
    """The kernels cannot be used on this machine. The message says why."""


class MatrixStruct(ctypes.Structure):
    """Mirrors ``Matrix`` of the library."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("block", c_int64))


class LayerStruct(ctypes.Structure):
    """Mirrors ``Layer`` of the library."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *(
            (name, c_void_p)
            for name in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "query_norm", "key_norm")
        ),
        *((name, c_void_p) for name in ("keys", "values")),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
    )


class ModelStruct(ctypes.Structure):
    """Mirrors ``Model`` of the library."""

    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("head", MatrixStruct),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in ("count", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        ("eps", c_float),
        ("late_rounding", c_int32),
        ("activation", c_int32),
    )


class _StepStruct(ctypes.Structure):
    """Mirrors ``Step`` of the library."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "table", "cosines", "sines", "residual", "logits", "states", "captured")),
        *((name, c_int64) for name in ("batch", "width", "page", "threads", "captures")),
    )


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight matrix [outputs, inputs] in the library's layout: panels of outputs, each contiguous."""

    panels: Tensor  # flat, zero-padded after the last output
    outputs: int
    inputs: int
    block: int  # inputs summed from zero before they are added to the running sum

    def to_dense(self) -> Tensor:
        """Return the matrix [outputs, inputs], bit-exact."""
        dense = torch.empty(self.outputs, self.inputs, dtype=self.panels.dtype)
        library, half = load_kernels().library, self.panels.dtype == torch.bfloat16
        library.strop_unpack(self.panels.data_ptr(), self.outputs, self.inputs, dense.data_ptr(), torch.get_num_threads(), half)
        return dense


class DecodeKernels:
    """The compiled library. All tensors are contiguous, on the CPU, in float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        _declare(library)
        self.library = library
        self.panel = int(library.strop_panel())  # outputs computed together

    def pack(self, weight: Tensor, dtype: torch.dtype) -> PackedMatrix:
        """Pack a matrix [outputs, inputs]. ``inputs`` must be even in bfloat16."""
        outputs, inputs = weight.shape
        size = -(-outputs // self.panel) * self.panel * inputs
        packed = PackedMatrix(torch.empty(size, dtype=dtype), outputs, inputs, measure_inner_block(inputs, dtype))
        dense = weight.detach().float().contiguous()
        half = dtype == torch.bfloat16
        self.library.strop_pack(dense.data_ptr(), outputs, inputs, packed.panels.data_ptr(), torch.get_num_threads(), half)
        return packed

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        """[.., inputs] -> [.., outputs], in the data type of ``x`` and the weights. ``bias`` [outputs] is added before rounding."""
        x, bias = x.contiguous(), None if bias is None else bias.float()
        out = x.new_empty(*x.shape[:-1], weight.outputs)
        rows = x.numel() // max(weight.inputs, 1)
        matrix = matrix_struct(weight, bias)
        half = x.dtype == torch.bfloat16
        arguments = (ctypes.byref(matrix), x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads(), half)
        _call(
            self.library.strop_linear,
            *arguments,
            product=(rows, weight.inputs, weight.outputs, "bfloat16" if half else "float32"),
        )
        return out

    def attend_pages(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of one query per sequence over its pages -> [B, H, D].

        ``query`` [B, H, D]; ``keys`` and ``values`` [P, KV, page, D]; ``table`` [B, n] int32, the pages of each sequence in order;
        ``lengths`` [B] int32. The query is at position lengths - 1, which a sliding window counts back from.
        """
        query = query.contiguous()
        batch, heads, size = query.shape
        _, kv_heads, page, _ = keys.shape
        out = torch.empty_like(query)
        addresses = (query.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), lengths.data_ptr())
        shape = (batch, table.shape[1], heads, kv_heads, page, size)
        options = (scale, window or 0, softcap or 0.0)
        half = query.dtype == torch.bfloat16
        _call(self.library.strop_attend_pages, *addresses, *shape, *options, torch.get_num_threads(), half, out.data_ptr())
        return out

    def sample(self, logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample from the softmax of logits [B, V] / temperature, one uniform number [B] in float32 for each row.

        Returns tokens, log-probabilities and entropies, [B] each.
        """
        logits = logits.contiguous()
        rows, vocabulary = logits.shape
        tokens, logprobs, entropies = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
        results = (tokens.data_ptr(), logprobs.data_ptr(), entropies.data_ptr())
        half = logits.dtype == torch.bfloat16
        _call(
            self.library.strop_sample,
            logits.data_ptr(),
            rows,
            vocabulary,
            temperature,
            uniforms.data_ptr(),
            torch.get_num_threads(),
            half,
            *results,
        )
        return tokens, logprobs, entropies

    def decode(
        self,
        model: ModelStruct,
        *,
        embedded: Tensor,
        positions: Tensor,
        table: Tensor,
        page: int,
        rotary: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        captured: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Compute one step of all layers and return the logits [B, V].

        ``embedded``: embeddings of the tokens, [B, hidden] in float32, which are overwritten. ``positions`` [B] int64; ``table`` [B, n]
        int32: the pages of each sequence. ``rotary``: cosines and sines [positions, D] in float32. The outputs of the layers
        ``captured`` [c] int64 are written to ``states`` [B, c, hidden] float32.
        """
        logits = torch.empty(len(embedded), model.head.outputs, dtype=dtype)
        tensors = (positions, table, *rotary, embedded, logits)
        captures = (
            (0, None, None) if captured is None or states is None else (len(captured), states.data_ptr(), captured.data_ptr())
        )
        sizes = (len(embedded), table.shape[1], page, torch.get_num_threads(), captures[0])
        step = _StepStruct(*(tensor.data_ptr() for tensor in tensors), *captures[1:], *sizes)
        _call(self.library.strop_decode, ctypes.byref(model), ctypes.byref(step), dtype == torch.bfloat16)
        return logits


def _call(function: Any, *arguments: Any, product: tuple[int, int, int, str] | None = None) -> None:
    """Call a function of the library. While a profile is recorded, record the call as a span, because torch's profiler cannot see
    it.

    ``product``: rows, inputs and outputs of a matrix product, and its number format."""
    if not RECORDER.is_recording:
        function(*arguments)
        return
    detail = "" if product is None else "[{0}, {1}] x [{2}, {1}]^T {3}".format(*product)
    with RECORDER.span("kernels", function.__name__, detail):
        function(*arguments)


def matrix_struct(weight: PackedMatrix, bias: Tensor | None) -> MatrixStruct:
    """Return a reference to a packed matrix and its bias [outputs] in float32; both must outlive it."""
    address = None if bias is None else bias.data_ptr()
    return MatrixStruct(weight.panels.data_ptr(), address, weight.outputs, weight.inputs, weight.block)


@lru_cache
def measure_inner_block(inputs: int, dtype: torch.dtype) -> int:
    """Return the number of inputs that torch's linear layers sum from zero before adding them to the running sum.

    oneDNN chooses it by the number of inputs. It determines how sums round; a sampler that rounds like the learner has the
    learner's log-probabilities. A 1 placed between 2^40 and -2^40 is lost unless a block begins between them.
    """
    pairs = inputs // 2
    if dtype != torch.bfloat16 or pairs < 3:
        return min(inputs, FLOAT32_BLOCK)
    row = torch.arange(pairs - 2)
    x = torch.zeros(pairs - 2, inputs)
    x[row, 2 * row], x[row, 2 * row + 2], x[row, 2 * row + 4] = 2.0**40, -(2.0**40), 1.0
    lost = torch.nn.functional.linear(x.to(dtype), torch.ones(64, inputs, dtype=dtype))[:, 0] == 0
    block = 2 * int(lost.nonzero()[0]) + 2 if lost.any() else inputs
    return block if block >= SMALLEST_BLOCK else inputs  # otherwise its summation is not described by blocks


_POINTER = c_void_p
_SIGNATURES: dict[str, Sequence[Any]] = {
    "strop_decode": (_POINTER, _POINTER, c_int),
    "strop_pack": (_POINTER, c_int64, c_int64, _POINTER, c_int, c_int),
    "strop_unpack": (_POINTER, c_int64, c_int64, _POINTER, c_int, c_int),
    "strop_linear": (_POINTER, _POINTER, c_int64, _POINTER, c_int, c_int),
    "strop_attend_pages": (*[_POINTER] * 5, *[c_int64] * 6, c_float, c_int64, c_float, c_int, c_int, _POINTER),
    "strop_sample": (_POINTER, c_int64, c_int64, c_float, _POINTER, c_int, c_int, *[_POINTER] * 3),
}


def _declare(library: ctypes.CDLL) -> None:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None


@lru_cache(maxsize=1)
def load_kernels() -> DecodeKernels:
    """Build the library if this machine has none yet, and load it. Raises KernelsUnavailable, with the same reason at every call."""
    if platform.system() != "Linux":
        raise KernelsUnavailable(f"they are built on Linux only, and this is {platform.system()}")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("g++")
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler: install g++")
    path = _library_path(compiler)
    if not path.exists():
        _build(compiler, path)
    if (owner := path.stat().st_uid) not in (0, os.geteuid()):
        raise KernelsUnavailable(
            f"{path} belongs to user {owner}, whose code would run here; remove it, or set XDG_CACHE_HOME to a folder of yours"
        )
    try:
        ctypes.CDLL(str(_find_openmp()), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    if not library.strop_vector_lanes():
        raise KernelsUnavailable("this processor has neither AVX2 nor AVX-512")
    return DecodeKernels(library)


def _find_openmp() -> Path:
    """Return the OpenMP runtime that torch has loaded. Raises KernelsUnavailable if that is not GNU's."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        name = line.split(maxsplit=5)[-1]
        if "/libgomp" in name:
            return Path(name)
    raise KernelsUnavailable("torch does not use GNU's OpenMP runtime, whose threads they would share")


def _library_path(compiler: str) -> Path:
    """Return the path of the library: under the hash of its source, the flags, the compiler and the processor."""
    cpu = [
        line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith(("model name", "flags"))
    ]
    built_by = Path(compiler).resolve().stat()
    identity = (SOURCE.read_text(encoding="utf-8"), FLAGS, compiler, built_by.st_size, built_by.st_mtime_ns, sorted(set(cpu)))
    return user_cache_folder() / f"decode_kernels-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"


def _build(compiler: str, path: Path) -> None:
    """Compile into a temporary file and rename it, so that processes can build at the same time."""
    log.info("building the decoding kernels with %s into %s (a few seconds, once on each machine)", compiler, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            part, built = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            # Linked without -fopenmp, which would link a second runtime: the symbols are found in torch's.
            for command in (
                [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(part)],
                [compiler, "-shared", str(part), "-o", str(built)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
            built.replace(path)
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{compiler} fails: {_first_line(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"they cannot be built into {path.parent}: {error}") from error


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines() or ["no message"]
    return lines[0]
