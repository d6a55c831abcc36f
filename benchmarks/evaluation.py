"""What an evaluation promises, on a real model: the same numbers to the last digit when it is repeated, killed and continued, and over two
Ray engines; and the memory that it takes.

    python benchmarks/evaluation.py [--model NAME] [--tasks 12] [--samples 4] [--vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from common import MODEL

POLL_SECONDS = 0.2


def make_command(model: str, tasks: int, samples: int, folder: Path, *more: str) -> list[str]:
    settings = {
        "generation.model_name": model,
        "generation.precision": "float32",
        "generation.device": "cpu",
        "generation.num_threads": 1,
        "generation.temperature": 0.8,
        "generation.max_new_tokens": 24,
        "generation.vllm_cfg.max_model_len": 256,
        "generation.torch_cfg.kv_cache_memory_gb": 0.5,
        "generation.torch_cfg.prepack_weights": False,
        "eval.num_tests_per_prompt": samples,
        "eval.k_value": 2,
        "eval.metric": "maj@k",
        "eval.save_path": str(folder),
        "data.size": tasks,
        "env.arithmetic.max_operand": 20,
    }
    return [
        sys.executable,
        "-m",
        "strop",
        "eval",
        "--json",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        *more,
    ]


def run(command: Sequence[str], *, kill_after: tuple[Path, int] | None = None) -> dict[str, Any]:
    """Run a command to its end, or until a file has so many lines. Return what it printed, and the most memory it took."""
    started, own, every = time.perf_counter(), 0, 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        own, every = max(own, _resident(process.pid)), max(every, _resident(process.pid, children=True))
        if kill_after is not None and _count_lines(kill_after[0]) > kill_after[1]:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    out, err = process.communicate()
    if kill_after is None and process.returncode:
        raise RuntimeError(err[-3000:])
    found = {"own_mib": own, "all_mib": every, "seconds": time.perf_counter() - started, "said": err}
    return {**found, **({} if process.returncode else json.loads(out))}


def _resident(pid: int, *, children: bool = False) -> int:
    """Return the resident memory of a process (MiB); with ``children`` the proportional share of all that belong to it."""
    try:
        process = psutil.Process(pid)
        if not children:
            return int(process.memory_info().rss) >> 20
        return sum(int(each.memory_full_info().pss) for each in (process, *process.children(recursive=True))) >> 20
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--vllm", action="store_true", help="also with vLLM in a process of its own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strop-evaluation-") as name:
        root = Path(name)

        def evaluate(folder: str, *more: str, kill_after: int | None = None) -> dict[str, Any]:
            command = make_command(options.model, options.tasks, options.samples, root / folder, *more)
            found = run(command, kill_after=None if kill_after is None else (root / folder / "tasks.jsonl", kill_after))
            path = root / folder / "step_000000.json"
            found["bytes"] = path.read_bytes() if path.exists() else b""
            print(
                f"{folder:12} {found['seconds']:6.0f} s   this process {found['own_mib']:6} MiB   all {found['all_mib']:6} MiB",
                flush=True,
            )
            return found

        first = evaluate("first")
        print(json.dumps({name: first[name] for name in ("metrics", "standard_errors", "confidence_intervals")}, indent=1))
        again = evaluate("again")
        one_by_one = "generation.num_prompts_per_step=2"
        evaluate("killed", one_by_one, kill_after=options.tasks // 3)
        continued = evaluate("killed", one_by_one)
        print(next(line for line in continued["said"].splitlines() if line.startswith("continuing")))
        ray = evaluate("ray", "cluster.backend=ray", "cluster.gpus_per_node=2", "generation.torch_cfg.num_engines=2")
        for said, other in (("repeated", again), ("killed and continued", continued), ("over two Ray engines", ray)):
            print(f"{said}: {'the same bytes' if other['bytes'] == first['bytes'] else 'DIFFERENT'}")
        if options.vllm:
            evaluate("vllm", "generation.backend=vllm", "generation.vllm_cfg.kv_cache_memory_gb=0.5")


if __name__ == "__main__":
    main()
