"""CUDA graphs for decoding: the launches of a whole step are captured once per batch size.

A decoding step of a small model consists of hundreds of short kernels, which take longer to launch than to run. Batch sizes are rounded up
to a power of two; the padding rows compute on position 0 of unused slots, and their logits are dropped. A size is captured when
it first occurs, while requests are running: the warm-up before the capture computes the step that is due anyway, so it writes
the right keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import upload
from strop.models.routing.router_replay import find_routers

log = logging.getLogger(__name__)

WARM_UPS = 2  # steps before a capture, in which libraries allocate their workspaces


def capture_obstacle(model: Any) -> str | None:
    """Return why decoding steps of a model cannot be captured, as far as known before the first capture; None if they may be."""
    if next(find_routers(model.get_decoder()), None) is None:
        return None
    experts = getattr(model.config, "_experts_implementation", None)
    if experts == "batched_mm":
        return None
    return f"it has experts, and their products ({experts}) may read each expert's number of tokens on the host"


@dataclass(frozen=True, eq=False)
class _CapturedGraph:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: Tensor  # [2, B] tokens and positions, static
    logits: Tensor  # [B, V], static


class DecodeGraphs:
    """Captures and replays ``step(tokens [B], positions [B]) -> logits [B, V]``, which must only use static memory.

    All graphs share one pool of memory and one stream, whose workspaces stay allocated: logits are valid until the next call.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], slots: int, device: torch.device) -> None:
        self.step = step
        self.slots = slots
        self.device = device
        self._cuda: Any = torch.get_device_module(device)
        self._stream = self._cuda.Stream(device)
        self._pool = self._cuda.graph_pool_handle()
        self._graphs: dict[int, _CapturedGraph] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """Return the logits after a step; None if it cannot be captured, with a warning that gives the reason. Then do not try
        again.
        """
        count = len(tokens)
        size = min(1 << (count - 1).bit_length(), self.slots)
        padding = [0] * (size - count)
        inputs = upload([[*tokens, *padding], [*positions, *padding]], torch.int64, self.device)
        if size not in self._graphs:
            captured = self._capture(inputs)
            if captured is None:
                return None
            self._graphs[size] = captured
        captured = self._graphs[size]
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.logits[:count]

    def _capture(self, inputs: Tensor) -> _CapturedGraph | None:
        with self._cuda.device(self.device):  # captures run on a stream of the current GPU
            before = self._cuda.current_stream(self.device)
            self._stream.wait_stream(before)
            with self._cuda.stream(self._stream):  # left in any case, because a failed capture would leave it current
                for _ in range(WARM_UPS):
                    self.step(*inputs)
                captured = self._record(inputs)
            before.wait_stream(self._stream)
            return captured

    def _record(self, inputs: Tensor) -> _CapturedGraph | None:
        graph = self._cuda.CUDAGraph()
        # thread_local: the learner's thread may allocate memory at the same time
        recording = self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with recording:
                logits = self.step(*inputs)
        except Exception as error:  # the step has just run uncaptured, so the error is due to the capture
            log.warning(
                "decoding without CUDA graphs, which is slower for small models: a step of %d sequences cannot be captured (%s)",
                inputs.shape[1],
                str(error.__context__ or error).partition("\n")[0],
            )
            self._leave_pool()
            return None
        return _CapturedGraph(graph, inputs, logits)

    def _leave_pool(self) -> None:
        """Make the allocator leave the pool of a failed capture, which torch does not do if CUDA refused to end the capture."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # it has left
                torch._C._cuda_endAllocateToPool(self._cuda.current_device(), self._pool)
