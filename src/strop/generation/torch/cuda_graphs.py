"""CUDA graphs for decoding: the launches of a whole step are captured once per batch size.

A decoding step of a small model consists of hundreds of short kernels, which take longer to launch than to run. Batch sizes are rounded up
to a power of two; the padding rows compute on position 0 of unused slots, and their logits are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [B], static
    positions: Tensor  # [B], static
    logits: Tensor  # [B, V], static


class DecodeGraphs:
    """Captures and replays ``step(tokens [B], positions [B]) -> logits [B, V]``, which must only use static memory."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], slots: int, device: torch.device) -> None:
        self.step = step
        self.slots = slots
        self.device = device
        self._graphs: dict[int, _CapturedGraph] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        count = len(tokens)
        size = min(1 << (count - 1).bit_length(), self.slots)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        captured = self._graphs[size]
        captured.tokens[:count].copy_(torch.tensor(tokens))
        captured.positions[:count].copy_(torch.tensor(positions))
        captured.positions[count:].zero_()
        captured.graph.replay()
        return captured.logits[:count]

    def _capture(self, size: int) -> _CapturedGraph:
        with torch.cuda.device(self.device):  # a capture takes the stream of the current GPU
            return self._capture_here(size)

    def _capture_here(self, size: int) -> _CapturedGraph:
        tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        positions = torch.zeros(size, dtype=torch.int64, device=self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # warm up: libraries allocate their workspaces before the capture
            for _ in range(2):
                self.step(tokens, positions)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.step(tokens, positions)
        return _CapturedGraph(graph, tokens, positions, logits)
