"""Fault injection: kill a random process in each of many short runs over Ray, and check that the run recovers.

    python benchmarks/fault_campaign.py --runs 60 --seed 1 --output campaign.json       # about an hour on two cores
    python benchmarks/fault_campaign.py --runs 3 --roles engine learner --modes synchronous

Each run is the ``strop`` command on a tiny model: two learner ranks, an engine, an environment server and the driver, each in its own
process. At a random moment one of them gets SIGKILL. A run that lost a worker must recover by itself; a run that lost its driver or its
node is started again with the same command. Then the run is checked: its exit code, that its records have every step and every rollout
exactly once, that no process is left, and in synchronous mode that the metrics equal those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.runs import Running, metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from loop.victims import MARK, Marked, describe_processes, find_processes, find_program, find_worker
from loop.victims import wait_for_exit as wait_for_processes

STEPS, GROUPS, SAMPLES = 8, 4, 8
RUN_SECONDS = 240.0  # a run that takes longer counts as hung
GONE_SECONDS = 20.0  # the processes of a finished run must exit within this time
NOISE = 2e-4  # relative: ranks and request batches sum float32 numbers in varying order
COMPARED = ("train/", "validation/")

LEARNERS = {"cluster.gpus_per_node": 2, "policy.device": "cpu"}
AHEAD = {
    "grpo.async_grpo.enabled": True,
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "loss_fn.use_importance_sampling_correction": True,
}
LORA = {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4}
VLLM = {
    "policy.generation.backend": "vllm",
    "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
    "policy.generation.vllm_cfg.num_threads": 1,
    "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
}
SGLANG = {
    "policy.generation.backend": "sglang",
    "policy.generation.sglang_cfg.max_total_tokens": 8192,
    "policy.generation.sglang_cfg.num_threads": 1,
    "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": AHEAD,
    "synchronous, LoRA": LORA,
    "asynchronous, LoRA": {**AHEAD, **LORA},
    "synchronous, vLLM": VLLM,
    "asynchronous, vLLM": {**AHEAD, **VLLM},
    "synchronous, SGLang": SGLANG,
    "asynchronous, SGLang": {**AHEAD, **SGLANG},
}
OFTEN = {
    "synchronous": 7,
    "asynchronous": 6,
    "synchronous, LoRA": 3,
    "asynchronous, LoRA": 2,
    "synchronous, vLLM": 1,
    "asynchronous, vLLM": 1,
    "synchronous, SGLang": 1,
    "asynchronous, SGLang": 1,
}
ROLES = (
    "driver",
    "learner rank 0",
    "learner rank 1",
    "engine",
    "environment host",
    "vLLM's engine process",
    "node",
    "SGLang's scheduler process",
    "SGLang's server process",
)
OF_ONE_ENGINE = {
    "vLLM's engine process": "vLLM",
    "SGLang's scheduler process": "SGLang",
    "SGLang's server process": "SGLang",
}
HAS_SGLANG = bool(os.environ.get("STROP_SGLANG_PYTHON"))  # otherwise no run of the campaign samples with it
WORKERS = {
    "learner rank 0": "learner-0",
    "learner rank 1": "learner-1",
    "engine": "engine-0",
    "environment host": "environment-arithmetic-0",
}
BY_COMMAND = ("driver", "node")  # their death ends the run; the same command continues it

# What the log must contain after a process died.
ACCOUNTS = {
    "learner rank 0": r"learner-0 \(process \d+.*restarts from",
    "learner rank 1": r"learner-1 \(process \d+.*restarts from",
    "engine": r"engine[- ]0.*(is restarted|is tried again|another process takes)",
    "vLLM's engine process": r"engine[- ]0.*(is restarted|is tried again|another process takes)",
    "SGLang's scheduler process": r"engine[- ]0.*(is restarted|is tried again|another process takes)",
    "SGLang's server process": r"engine[- ]0.*(is restarted|is tried again|another process takes)",
    "environment host": r"environment-arithmetic-0.*(another process takes its place|on its replacement)",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: which process is killed, and when."""

    number: int
    mode: str
    role: str
    after: int  # logged steps before the kill; -1: during startup, once the process exists
    delay: float  # additional seconds
    save_period: int
    joins: bool  # joins the running cluster instead of starting its own


@dataclass(kw_only=True)
class Result:
    """The result of a run."""

    case: Case
    struck: str = ""  # the killed process and the last logged step; "" if the run ended before
    reached: int = 0  # steps logged before the kill
    lives: int = 1  # number of attempts: starts of the command
    codes: list[int] = field(default_factory=list)  # one exit code per attempt
    lost: float | None = None  # the longest time in seconds after the kill without a new logged step
    gone: float = 0.0  # the longest time in seconds until all processes exited after a driver ended
    deviation: float | None = None  # largest relative difference to the undisturbed run's metrics
    failures: list[str] = field(default_factory=list)
    folder: str = ""

    @property
    def good(self) -> bool:
        return not self.failures


def draw_cases(runs: int, seed: int, roles: Sequence[str], modes: Sequence[str]) -> list[Case]:
    """Draw the cases: roles in turn, modes and moments at random."""
    draw = random.Random(seed)
    cases: list[Case] = []
    turn = 0
    while len(cases) < runs:
        role = roles[turn % len(roles)]
        turn += 1
        fitting = list(modes)
        if role in OF_ONE_ENGINE:
            fitting = [mode for mode in modes if OF_ONE_ENGINE[role] in mode]
            if turn > len(roles) and draw.random() < 0.6:  # these runs take twice as long
                continue
        if not fitting:
            raise SystemExit(f"no mode of {', '.join(modes)} has the role {role}")
        mode = draw.choices(fitting, [OFTEN[name] for name in fitting])[0]
        starting = draw.random() < 0.25
        cases.append(
            Case(
                number=len(cases) + 1,
                mode=mode,
                role=role,
                after=-1 if starting else draw.randint(0, STEPS - 2),
                delay=draw.uniform(0, 12) if starting else draw.uniform(0, 1.2),
                save_period=draw.choice((1, 2)),
                joins=role != "node" and draw.random() < 0.7,
            )
        )
    return cases


# --- processes -------------------------------------------------------------------------------------------------------------------------


def find_victim(case: Case, running: Running, mark: str) -> psutil.Process | None:
    match case.role:
        case "driver":
            return psutil.Process(running.process.pid)
        case "node":
            return find_program(["raylet"] if case.number % 2 else ["gcs_server"], mark)
        case "vLLM's engine process":
            return find_program(["VLLM::EngineCore", "EngineCore"], mark)
        case "SGLang's scheduler process":
            return find_program(["sglang::schedul"], mark)
        case "SGLang's server process":  # it has the interpreter's name: it is the parent of the scheduler
            scheduler = find_program(["sglang::schedul"], mark)
            return None if scheduler is None else scheduler.parent()
    return find_worker(WORKERS[case.role], mark)


def find_actors(head: psutil.Process | None) -> list[psutil.Process]:
    """Return the Ray actors of runs that joined the running cluster."""
    found = []
    with suppress(psutil.Error):
        for process in [] if head is None else head.children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and "IDLE" not in title and "Agent" not in title:
                    found.append(process)
    return found


# --- one run ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CampaignContext:
    """What all runs of a campaign share."""

    folder: Path
    model: Path
    address: str  # of the running cluster
    head: psutil.Process  # the cluster's first process
    undisturbed: dict[str, Path] = field(default_factory=dict)  # by mode

    def settings(self, case: Case, mark: str) -> dict[str, Any]:
        marks = {f"cluster.roles.{role}.env_vars": {MARK: mark} for role in ("learner", "generator", "environment")}
        return {
            **tiny_config(self.model),
            **LEARNERS,
            **MODES[case.mode],
            **marks,
            "cluster.address": self.address if case.joins else "local",
            "cluster.environment_hosts": 1,
            "checkpointing.save_period": case.save_period,
            "checkpointing.metric_name": None,
            "grpo.max_num_steps": STEPS,
            "grpo.val_period": 0,
            "logger.console": "plain",
        }


def launch(stage: CampaignContext, case: Case, folder: Path) -> Running:
    mark = str(folder)
    return start(["grpo", *overrides(stage.settings(case, mark))], folder, before=Marked(mark))


def steps_logged(folder: Path) -> int:
    file = folder / "logs" / "metrics.jsonl"
    if not file.exists():
        return 0
    lines = file.read_text(errors="replace").splitlines()
    steps = [int(found[1]) for line in lines if (found := re.search(r'"step": ?(\d+)', line))]
    return max(steps, default=0)


def kill_victim(case: Case, running: Running, result: Result) -> tuple[float, list[psutil.Process]]:
    """Kill the case's process at its moment. Returns the time, and the driver's descendants at that time."""
    folder, mark = running.folder, str(running.folder)
    deadline = time.monotonic() + RUN_SECONDS
    while running.process.is_alive() and time.monotonic() < deadline:
        ready = steps_logged(folder) >= case.after if case.after >= 0 else find_victim(case, running, mark) is not None
        if ready and case.after == 0:  # between the first publish of the weights and the first step
            ready = "weights: version 0 is in" in _output(folder)
        if ready:
            break
        time.sleep(0.02)
    time.sleep(case.delay)
    victim = find_victim(case, running, mark)
    while victim is None and running.process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
        victim = find_victim(case, running, mark)
    if victim is None or not running.process.is_alive():
        return time.monotonic(), []
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(running.process.pid).children(recursive=True)
    result.reached = steps_logged(folder)
    with suppress(psutil.Error):
        result.struck = f"{victim.name()} {victim.pid} after step {result.reached}"
        victim.kill()
    return time.monotonic(), family


class CampaignProgress:
    """Measures the longest time without a new step."""

    def __init__(self, folder: Path, since: float) -> None:
        self.folder = folder
        self.furthest = steps_logged(folder)
        self._since = since
        self.longest: float | None = None

    def update(self) -> None:
        now, steps = time.monotonic(), steps_logged(self.folder)
        if steps > self.furthest:
            self.longest = max(self.longest or 0.0, now - self._since)
            self.furthest, self._since = steps, now


def wait_for_exit(running: Running, progress: CampaignProgress) -> int | None:
    """Wait for the run to end. Returns its exit code, or None if it hangs."""
    deadline = time.monotonic() + RUN_SECONDS
    while running.process.is_alive() and time.monotonic() < deadline:
        progress.update()
        time.sleep(0.05)
    if running.process.is_alive():
        return None
    running.process.join()
    progress.update()
    return int(running.process.exitcode)


def run_case(stage: CampaignContext, case: Case) -> Result:
    """Perform one run to its end and check it."""
    folder = stage.folder / f"run_{case.number}"
    result = Result(case=case, folder=str(folder))
    running = launch(stage, case, folder)
    family: list[psutil.Process] = []
    struck = time.monotonic()
    if case.role:
        struck, family = kill_victim(case, running, result)
    progress = CampaignProgress(folder, struck)
    said = ""
    while True:
        code = wait_for_exit(running, progress)
        result.lost = progress.longest
        said += _output(folder)
        if code is None:
            result.failures.append(f"attempt {result.lives} hung")
            end(running, str(folder))
            return result
        result.codes.append(code)
        left, seconds = wait_for_processes(str(folder), [*family, *find_actors(stage.head if case.joins else None)], GONE_SECONDS)
        result.gone = max(result.gone, seconds)
        if left:
            result.failures.append(f"left over after attempt {result.lives}: {describe_processes(left)}")
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
        if code == 0 or case.role not in BY_COMMAND or result.lives > 1:
            break
        result.lives += 1
        running = launch(stage, case, folder)
    (folder / "said.txt").write_text(said)
    check_result(stage, case, result, said)
    return result


def _output(folder: Path) -> str:
    return "".join((folder / name).read_text(errors="replace") for name in (".out", ".err") if (folder / name).exists())


def end(running: Running, mark: str) -> None:
    """Kill all processes of a hung run."""
    running.process.kill()
    running.process.join()
    for process in find_processes(mark):
        with suppress(psutil.Error):
            process.kill()


# --- checks ---------------------------------------------------------------------------------------------------------------------------


def check_result(stage: CampaignContext, case: Case, result: Result, said: str) -> None:
    folder, failures = Path(result.folder), result.failures
    if result.codes[-1] != 0:
        failures.append(f"exit code {result.codes[-1]}: {' / '.join(said.strip().splitlines()[-2:])[:400]}")
        return
    for check in (check_steps_unique, check_rollouts_unique):
        if (wrong := check(folder)) is not None:
            failures.append(wrong)
    needed = result.struck and result.reached < STEPS - 1  # a death in the last step may go unnoticed
    if needed and case.role in ACCOUNTS and not re.search(ACCOUNTS[case.role], said, re.DOTALL):
        failures.append("the log does not say which process died and how the run continued")
    if (
        result.lives > 1
        and case.role in BY_COMMAND
        and not re.search("continuing after step|no checkpoint to continue from|step 1/|finished at step", said)
    ):
        failures.append("the log does not say from which step the run continued")
    if "asynchronous" not in case.mode and case.mode in stage.undisturbed and not failures:
        result.deviation = compute_deviation(folder, stage.undisturbed[case.mode])
        if result.deviation > NOISE:
            failures.append(f"metrics differ from the undisturbed run's by {result.deviation:.2g}")


def check_steps_unique(folder: Path) -> str | None:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    return None if steps == list(range(1, STEPS + 1)) else f"metrics.jsonl has the steps {steps}"


def check_rollouts_unique(folder: Path) -> str | None:
    """Check the stored rollouts: no duplicates, and no gaps, since tasks start in order."""
    from strop.monitoring.rollout_store.rollout_store import RolloutStore

    records = list(RolloutStore(folder / "logs").read_all())
    twice = [key for key, count in Counter((record.group, record.sample) for record in records).items() if count > 1]
    if twice:
        return f"duplicate rollouts: {twice[:5]}"
    trained = Counter(record.group for record in records if record.kept)
    if set(trained.values()) != {SAMPLES} or len(trained) != STEPS * GROUPS:
        return f"{len(trained)} groups were trained on, of {sorted(set(trained.values()))} rollouts"
    seen = {record.group for record in records}
    if seen != set(range(len(seen))):
        return f"groups are missing: {sorted(set(range(max(seen) + 1)) - seen)[:5]}"
    return None


def compute_deviation(folder: Path, wanted: Path) -> float:
    """Return the largest difference between the metrics of two runs, relative for values above 1."""
    own, other = metrics_of(folder / "logs"), metrics_of(wanted / "logs")
    worst = 0.0
    for step, line in other.items():
        for name, value in line.items():
            if not name.startswith(COMPARED) or "rank" in name or "seconds" in name:
                continue
            found = own[step].get(name, math.nan)
            gap = abs(found - value) / max(1.0, abs(value))
            worst = max(worst, math.inf if math.isnan(gap) and not (math.isnan(found) and math.isnan(value)) else gap)
    return worst


# --- the campaign ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a Ray cluster that outlives the runs, in its own folder. Yields its address and its first process."""
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "SPT_NOENV": "1",
    }
    port = 20000 + os.getpid() % 10000
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    command = [*ray, "start", "--head", f"--port={port}", "--num-cpus=4", "--num-gpus=0", "--include-dashboard=false", "--block"]
    with open(folder / "ray.log", "w") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (folder / "ray.log").read_text():
            if head.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Ray did not start: {(folder / 'ray.log').read_text()}")
            time.sleep(0.2)
        yield address, psutil.Process(head.pid)
    finally:
        family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(20)
        for process in [*family, head]:
            with suppress(psutil.Error, OSError):
                process.kill()


class MachineLock:
    """Shares the machine with other processes through a file lock, some minutes each. Without a file it does nothing."""

    def __init__(self, file: Path | None, seconds: float = 240.0) -> None:
        self._file: IO[str] | None = None if file is None else open(file, "a")  # noqa: SIM115
        self._seconds = seconds
        self._since: float | None = None

    def take(self) -> None:
        if self._file is None:
            return
        if self._since is not None and time.monotonic() - self._since > self._seconds:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None
            time.sleep(1)
        if self._since is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()


def run_undisturbed(stage: CampaignContext, mode: str, turns: MachineLock) -> None:
    """Perform the undisturbed run of a mode, the reference for comparisons."""
    turns.take()
    number = 1000 + len(stage.undisturbed)
    case = Case(number=number, mode=mode, role="", after=0, delay=0, save_period=2, joins=True)
    result = run_case(stage, case)
    if not result.good:
        raise SystemExit(f"the undisturbed run failed, {mode}: {result.failures}; see {result.folder}")
    stage.undisturbed[mode] = Path(result.folder)


def run_campaign(
    cases: Sequence[Case], stage: CampaignContext, turns: MachineLock, report: Callable[[Sequence[Result]], None], *, keep: bool
) -> list[Result]:
    results: list[Result] = []
    for case in cases:
        if "asynchronous" not in case.mode and case.mode not in stage.undisturbed:
            run_undisturbed(stage, case.mode, turns)
        turns.take()
        began = time.monotonic()
        result = run_case(stage, case)
        results.append(result)
        print(_format_result(result, time.monotonic() - began), flush=True)
        if result.good and not keep:
            shutil.rmtree(result.folder, ignore_errors=True)
        report(results)
    return results


def _format_result(result: Result, seconds: float) -> str:
    case = result.case
    when = "while starting" if case.after < 0 else f"after step {case.after}"
    where = "joined" if case.joins else "own"
    how = "ok" if result.good else "FAILED: " + " | ".join(result.failures)
    lost = "" if result.lost is None else f", {result.lost:.1f} s lost"
    return (
        f"{case.number:3d} {case.mode}, {where} cluster: {case.role} {when} + {case.delay:.1f} s [{result.struck or 'not struck'}] "
        f"-> {result.codes} in {seconds:.0f} s{lost}, gone in {result.gone:.1f} s, deviation {result.deviation}: {how}"
    )


def outcome_table(results: Sequence[Result]) -> str:
    """Format a table with one row per role and mode."""
    rows = []
    for role in ROLES:
        for mode in MODES:
            own = [result for result in results if result.case.role == role and result.case.mode == mode and result.struck]
            if not own:
                continue
            good = [result for result in own if result.good]
            lost = [result.lost for result in own if result.lost is not None]
            rows.append(
                [
                    role,
                    mode,
                    str(len(own)),
                    str(sum(result.lives == 1 for result in good)),
                    str(sum(result.lives > 1 for result in good)),
                    str(len(own) - len(good)),
                    f"{median(lost):.0f}" if lost else "",
                ]
            )
    struck = [result for result in results if result.struck]
    good = [result for result in struck if result.good]
    lost = [result.lost for result in struck if result.lost is not None]
    rows.append(
        [
            "**all**",
            "",
            str(len(struck)),
            str(sum(result.lives == 1 for result in good)),
            str(sum(result.lives > 1 for result in good)),
            str(len(struck) - len(good)),
            f"{median(lost):.0f}" if lost else "",
        ]
    )
    head = ["killed", "mode", "runs", "went on by itself", "went on by command", "failed", "seconds without a new step, median"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of short runs over Ray and check that the runs recover.")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--roles", nargs="+", choices=ROLES, default=[role for role in ROLES if HAS_SGLANG or "SGLang" not in role]
    )
    parser.add_argument(
        "--modes", nargs="+", choices=list(MODES), default=[mode for mode in MODES if HAS_SGLANG or "SGLang" not in mode]
    )
    parser.add_argument("--only", nargs="+", type=int, help="perform only the runs with these numbers")
    parser.add_argument("--output", type=Path, help="JSON file with all runs, rewritten after each run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of successful runs too")
    parser.add_argument("--turns", type=Path, help="a lock file to share the machine with, held a few minutes at a time")
    options = parser.parse_args()
    cases = draw_cases(options.runs, options.seed, options.roles, options.modes)
    if options.only:
        cases = [case for case in cases if case.number in options.only]
    folder = Path(tempfile.mkdtemp(prefix="strop-faults-"))
    began = time.time()

    def report(results: Sequence[Result]) -> None:
        if options.output is not None:
            found = {
                "seed": options.seed,
                "began": began,
                "seconds": time.time() - began,
                "runs": [{**asdict(result), "good": result.good} for result in results],
            }
            options.output.write_text(json.dumps(found, indent=1))

    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    turns = MachineLock(options.turns)
    with ExitStack() as stack:
        turns.take()
        address, head = stack.enter_context(running_cluster(folder))
        stage = CampaignContext(folder, build_tiny(folder / "model", head_dim=32), address, head)
        results = run_campaign(cases, stage, turns, report, keep=options.keep)
    print()
    print(outcome_table(results))
    bad = [result for result in results if not result.good]
    missed = [result for result in results if not result.struck]
    print(
        f"\n{len(results)} runs in {time.time() - began:.0f} s; {len(missed)} were over before the kill; {len(bad)} failed; in {folder}"
    )
    for result in bad:
        print(f"  {result.case.number}: {' | '.join(result.failures)}; {result.folder}")
    if not bad and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
