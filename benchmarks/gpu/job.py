"""One measurement in a process of its own: it imports what it needs, waits for its turn, and writes rows as it finds them.

``run.py`` starts it. It begins when a line arrives on its standard input, so imports of many seconds cost no measurement anything.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The root too: processes that tests start import modules such as tests.gpu.test_gpu_weights.
FOLDERS = [str(ROOT / folder) for folder in ("", "src", "benchmarks", "benchmarks/gpu", "tests")]
ROW = "@row "  # begins the lines that are rows; all others are the job's log
STACKS_BEFORE_LIMIT = 5.0  # seconds before the limit at which the stacks of a job that hangs are logged
_output = 1


@dataclass(frozen=True)
class Target:
    """The device that is measured, and the folders that jobs share."""

    device: str
    work: Path  # temporary files, such as models
    out: Path  # results
    kit: Path | None = None  # vLLM for this card

    @property
    def tiny(self) -> bool:
        """Whether sizes are those of a rehearsal."""
        return self.device != "cuda"

    def synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of tensors on the GPU."""
        import torch

        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def take_peak(self) -> str:
        """Return the peak of memory since the last call."""
        import torch

        if self.device != "cuda":
            return ""
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return f"peak {peak:.1f} GiB"


def write_row(name: str, value: str, note: str = "", *, ok: bool = True, **numbers: float) -> None:
    """Hand a row of the table to ``run.py``. ``numbers``: the same for programs."""
    line = json.dumps({"name": name, "value": value, "note": note, "ok": ok, "numbers": numbers})
    os.write(_output, f"\n{ROW}{line}\n".encode())  # libraries may have left a line unfinished


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"


def prepare_device(device: str) -> None:
    """Make the simulated GPU of the tests the GPU of this process, where it is the one."""
    if device == "sim":
        import_module("support.simulated_device.in_process").take_simulated_gpu()


def load(function: str) -> Callable[..., Any]:
    """Return the function of ``module:function``."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def main() -> int:
    global _output
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--device", "--work", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--kit", type=Path)
    parser.add_argument("name")
    parser.add_argument("function")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    target = Target(options.device, Path(options.work), Path(options.out), options.kit)
    _output = os.dup(1)  # pytest redirects the first one
    try:
        prepare_device(target.device)
        function = load(options.function)
        deadline = sys.stdin.readline()
        if not deadline:
            return 1  # nobody waits for the result any more
        faulthandler.dump_traceback_later(max(float(deadline) - time.time() - STACKS_BEFORE_LIMIT, 1.0))
        function(target, *options.arguments)
    except Exception as error:  # such as no memory left: a result too
        traceback.print_exc()
        write_row(options.name, f"failed: {describe_error(error)}", ok=False)
    return 0


if __name__ == "__main__":
    sys.path[:0] = FOLDERS
    import job  # the one that measurements import

    sys.exit(job.main())
