"""What a profile of a step costs, and what the code that could record one costs while it does not.

    python benchmarks/profiling_cost.py [--steps 30] [--model NAME]

Microseconds of a wait and of a span, on and off, in alternation; then one run of the quickstart recipe in one process in which every other
step is recorded, without and with torch's operators: the ratio of the medians of recorded and other steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import MODEL

from strop import cli
from strop.monitoring.process_profile import RECORDER
from strop.monitoring.waits import waiting

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
REPEATS, CALLS = 15, 5000


def wait_once() -> None:
    with waiting("sample 3", on="engine, turn 1", kind="generation"):
        pass


def span_once() -> None:
    with RECORDER.span("engine", "decode"):
        pass


def measure(call: Callable[[], None], *, recorded: bool) -> float:
    """Return the microseconds of a call."""
    if recorded:
        RECORDER.begin()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - started
    RECORDER.end()
    return 1e6 * seconds / CALLS


def compare_steps(model: str, steps: int, operators: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of the steps that are recorded and of those that are not, without the first two."""
    profiled = list(range(3, steps + 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "logger.profile.steps": profiled, "logger.profile.operators": operators, "logger.console": "none", "logger.log_dir": folder,
            "policy.model_name": model, "checkpointing.enabled": False, "grpo.max_num_steps": steps, "grpo.val_at_start": False,
            "grpo.val_at_end": False, "policy.num_threads": 1,
        }  # fmt: skip
        code = cli.main(["grpo", "--config", str(CONFIG), *(f"{key}={json.dumps(value)}" for key, value in settings.items())])
        assert code == 0
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["timing/train/total_step_time"] for line in lines}
    return [times[step] for step in profiled], [seconds for step, seconds in times.items() if step not in profiled and step > 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    for name, call in (("wait", wait_once), ("span", span_once)):
        pairs = [(measure(call, recorded=False), measure(call, recorded=True)) for _ in range(REPEATS)]
        off, on = (sorted(column) for column in zip(*pairs, strict=True))
        print(
            f"{name}: off {median(off):.2f} us ({off[0]:.2f} to {off[-1]:.2f}), on {median(on):.2f} us ({on[0]:.2f} to {on[-1]:.2f})"
        )
    for operators in (False, True):
        recorded, others = compare_steps(options.model, options.steps, operators)
        ratio = median(recorded) / median(others)
        what, counts = "with operators" if operators else "spans alone", f"{len(recorded)} and {len(others)} steps"
        print(f"{what}: {median(recorded):.3f} s recorded, {median(others):.3f} s not, {ratio:.3f} times; {counts}")


if __name__ == "__main__":
    main()
