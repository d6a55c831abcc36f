"""Fault injection in runs of one process: kill a run at random moments, start it again, and compare it with an undisturbed one.

    python benchmarks/kill_campaign.py --kills 60 --seed 1 --output kills.json       # two minutes on two cores
    python benchmarks/kill_campaign.py --kills 4 --kinds LoRA asynchronous

Each run is the ``strop`` command on a tiny model. It gets SIGKILL at a moment drawn uniformly from the time that an undisturbed run takes,
is started again with the same command, killed again, and so on, then left alone. In the end the synchronous kinds must equal the
undisturbed run bit for bit: every metric but times, every stored rollout, every checkpoint that is kept, its weights, optimizer and
averages. The asynchronous kind must have trained on every rollout exactly once, none older than allowed. No process and no draft of a
checkpoint may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.kinds import bitwise_equal, start_run
from loop.runs import Running, metrics_of, repeatable
from loop.tiny import build_tiny
from strop.monitoring.rollout_store.rollout_store import RolloutStore

STEPS, GROUPS, SAMPLES, MAX_AGE = 8, 4, 8, 1
KILLS_IN_A_CHAIN = 3
GONE_SECONDS = 20.0  # the processes of a killed run must exit within this time
RUN_SECONDS = 180.0  # a run that takes longer counts as hung


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run: its command, its settings, and whether it repeats bit for bit."""

    section: str = "grpo"
    changes: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = True

    def settings(self) -> dict[str, Any]:
        return {f"{self.section}.max_num_steps": STEPS, "checkpointing.save_period": 1, **self.changes}


KINDS: dict[str, Kind] = {
    "synchronous": Kind(changes={"grpo.val_at_start": True, "grpo.use_dynamic_sampling": True}),
    "asynchronous": Kind(
        changes={"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": MAX_AGE}, repeats=False
    ),
    "LoRA": Kind(changes={"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4}),
    "critic": Kind(section="ppo"),
    "async save": Kind(changes={"checkpointing.async_save": True, "policy.ema.enabled": True}),
    "keep_top_k": Kind(changes={"checkpointing.keep_top_k": 2}),
    "sft": Kind(section="sft"),
    "dpo": Kind(section="dpo"),
}


@dataclass(kw_only=True)
class Result:
    """What came of a chain of kills."""

    kind: str
    chain: int
    killed_after: list[float] = field(default_factory=list)  # seconds after each start
    logged_steps: list[int] = field(default_factory=list)  # at each kill
    ended_before: int = 0  # moments that came after the run's end
    failures: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="kills over all kinds (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="strop_kills_"))
    model = folder / "tiny"
    build_tiny(model)
    draw = random.Random(options.seed)
    run_undisturbed(options.kinds[0], model, folder / "warm_up")  # the first run of all also starts the server of processes
    undisturbed = {name: run_undisturbed(name, model, folder / name.replace(" ", "_") / "undisturbed") for name in options.kinds}
    results: list[Result] = []
    while sum(len(result.killed_after) for result in results) < options.kills:
        name = options.kinds[len(results) % len(options.kinds)]
        target = folder / name.replace(" ", "_") / f"chain_{len(results)}"
        result = run_chain(name, len(results), model, target, undisturbed[name], draw)
        results.append(result)
        print(
            f"{len(results):3}  {name:12}  killed after {', '.join(f'{seconds:.1f} s' for seconds in result.killed_after)}"
            f"  at steps {result.logged_steps}  {'; '.join(result.failures) or 'as the undisturbed run'}",
            flush=True,
        )
        if not result.failures:
            shutil.rmtree(target)
    print_summary(results)
    if options.output:
        options.output.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if any(result.failures for result in results):
        print(f"kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


@dataclass(frozen=True)
class Undisturbed:
    folder: Path
    seconds: float


def run_undisturbed(name: str, model: Path, folder: Path) -> Undisturbed:
    started = time.monotonic()
    outcome = launch(name, model, folder).finish(RUN_SECONDS)
    assert outcome.code == 0, f"{name}: the undisturbed run failed: {outcome.err}"
    return Undisturbed(folder, time.monotonic() - started)


def launch(name: str, model: Path, folder: Path) -> Running:
    return start_run(KINDS[name].section, model, folder, **KINDS[name].settings())


def run_chain(name: str, chain: int, model: Path, folder: Path, wanted: Undisturbed, draw: random.Random) -> Result:
    """Kill one run several times at random moments, let it finish, and compare it."""
    result = Result(kind=name, chain=chain)
    for _ in range(KILLS_IN_A_CHAIN):
        running, delay = launch(name, model, folder), draw.uniform(0, wanted.seconds)
        running.process.join(delay)
        if running.process.exitcode is not None:
            result.ended_before += 1
            if running.process.exitcode != 0:
                result.failures.append(f"exit code {running.process.exitcode}: {(folder / '.err').read_text()[-500:]}")
            break
        kill(running, result)
        result.killed_after.append(delay)
        result.logged_steps.append(count_steps(folder))
    outcome = launch(name, model, folder).finish(RUN_SECONDS)
    if outcome.code != 0:
        result.failures.append(f"exit code {outcome.code}: {outcome.err[-500:]}")
    else:
        result.failures += compare_runs(folder, wanted.folder) if KINDS[name].repeats else check_accounting(folder)
    return result


def kill(running: Running, result: Result) -> None:
    """Send SIGKILL to the driver alone, and wait until its children are gone by themselves."""
    process = psutil.Process(running.process.pid)
    family = process.children(recursive=True)
    process.send_signal(signal.SIGKILL)
    running.process.join()
    _, left = psutil.wait_procs(family, GONE_SECONDS)
    result.failures += [f"process {each.pid} was left" for each in left]


def count_steps(folder: Path) -> int:
    path = folder / "logs" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def compare_runs(folder: Path, wanted: Path) -> list[str]:
    """Return in what a run differs from the undisturbed one; empty if in nothing."""
    failures = []
    if repeatable(metrics_of(folder / "logs")) != repeatable(metrics_of(wanted / "logs")):
        failures.append("the metrics differ")
    if list(RolloutStore(folder / "logs").read_all()) != list(RolloutStore(wanted / "logs").read_all()):
        failures.append("the stored rollouts differ")
    own, other = (list_files(path / "results") for path in (folder, wanted))
    if own != other:
        failures.append(f"files of checkpoints: {sorted(set(own) ^ set(other))}")
    return failures + [f"{name} differs" for name in own if not same_file(folder / "results" / name, wanted / "results" / name)]


def list_files(folder: Path) -> list[str]:
    """Return what checkpoints consist of: tensors, and the names of everything else. No draft may be among them."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".strop.lock")


def same_file(one: Path, other: Path) -> bool:
    if one.suffix == ".safetensors":
        return one.read_bytes() == other.read_bytes()
    if one.name == "optimizer.pt":
        return bitwise_equal(torch.load(one), torch.load(other))
    return True


def check_accounting(folder: Path) -> list[str]:
    """Check that every rollout was trained on once, at its step, and was not too old."""
    records = list(RolloutStore(folder / "logs").read_all())
    counts = Counter((record.group, record.sample) for record in records)
    wanted = {(group, sample) for group in range(STEPS * GROUPS) for sample in range(SAMPLES)}
    failures = [f"rollout {key} occurs {counts[key]} times" for key in sorted(wanted | set(counts)) if counts[key] != 1]
    ages = {record.step - 1 - version for record in records for version in record.versions if version >= 0}
    if ages - set(range(MAX_AGE + 1)):
        failures.append(f"ages {sorted(ages)}")
    if list(metrics_of(folder / "logs")) != list(range(1, STEPS + 1)):
        failures.append(f"steps {list(metrics_of(folder / 'logs'))}")
    return failures


def print_summary(results: Sequence[Result]) -> None:
    print("\n| kind | chains | kills | as the undisturbed run |\n|---|---|---|---|")
    for name in dict.fromkeys(result.kind for result in results):
        own = [result for result in results if result.kind == name]
        kills = sum(len(result.killed_after) for result in own)
        print(f"| {name} | {len(own)} | {kills} | {sum(not result.failures for result in own)} |")


if __name__ == "__main__":
    sys.exit(main())
