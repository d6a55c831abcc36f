"""What a GPU says of this checkout in ten minutes: one command, the rows of most worth first, each written when it is known.

    python benchmarks/gpu/run.py --wheels wheels --out results            # benchmarks/gpu/carry.py fetched the wheels
    python benchmarks/gpu/run.py --stages learner mfu --budget 200
    python benchmarks/gpu/run.py --device cpu                             # rehearses all of it at tiny sizes

Needs this checkout, PyTorch with CUDA, Transformers, what ``machine.txt`` lists, and the wheels of what else Strop imports. Models have
random weights; there is no network. Each job has a process and a limit of its own: one that fails, hangs or dies is a row, and the others
go on. Processes start ahead of their turn, since imports take many seconds. In the folder of results are ``table.md`` (for docs/log),
``rows.jsonl``, ``log.txt`` with all that the jobs print, and profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from job import FOLDERS, ROOT, ROW

PACKAGES = ("torch", "transformers", "triton", "torchao", "megatron-core", "pydantic")
LEAST_SECONDS = 10.0  # a job is not begun with less
REHEARSAL_LIMIT = 5  # times the limit of a GPU: a CPU is slow, and has other work
TEST_FILES = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


@dataclass(frozen=True)
class Job:
    """A function ``module:function`` that takes the target and arguments, and its limit in seconds."""

    name: str
    function: str
    limit: float
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Jobs that belong together. ``together``: they run at once, since they measure no time."""

    name: str
    jobs: tuple[Job, ...]
    together: bool = False


def run_some(file: str, which: str) -> Job:
    return Job(f"{file}, {which}", "checks:run_tests", 60, (f"tests/gpu/{file}", "-k", which))


def grpo(name: str, *overrides: str, limit: float = 90) -> Job:
    return Job(f"GRPO, {name}", "checks:grpo", limit, (name, *overrides))


STAGES = (
    Stage(
        "kernels",
        (
            Job("kernels compile", "checks:run_tests", 60, ("tests/unit/test_triton_kernels_compile.py",)),
            run_some("test_gpu_learner.py", "tritons_kernels or gradients_and_metrics"),
            run_some("test_gpu_engine.py", "sampler_and_learner"),
        ),
        together=True,
    ),
    Stage("tests", tuple(Job(name, "checks:run_tests", 110, (f"tests/gpu/{name}",)) for name in TEST_FILES), together=True),
    Stage("learner", (Job("the machine", "speed:machine", 40), Job("learner, 1.5B", "speed:learner", 130, ("1.5B",)))),
    Stage("grpo", (grpo("plain"),)),
    Stage(
        "grpo variants",
        (
            grpo("repeated"),
            grpo("without CUDA graphs", "policy.generation.torch_cfg.cuda_graphs=false"),
            grpo("offloaded", "policy.offload=true"),
            grpo("bfloat16 weights", "policy.weights_dtype=bfloat16"),
            grpo("FP8", "policy.fp8.enabled=true"),
            Job("GRPO, stopped and resumed", "checks:resumed_grpo", 150),
        ),
        together=True,
    ),
    Stage(
        "publish",
        tuple(Job(f"publish by {name}", "speed:publish", 60, (name,)) for name in ("cuda_ipc", "memory", "gloo", "nccl")),
    ),
    Stage("decoding", (Job("decoding", "speed:decoding", 90),)),
    Stage("profile", (Job("profile", "speed:profile", 80),)),
    Stage(
        "mfu",
        (
            Job("learner, slice of 8B", "speed:learner", 90, ("8B",)),
            Job("learner, 0.5B", "speed:learner", 70, ("0.5B",)),
            Job("learner, long contexts", "speed:learner", 80, ("1.5B-long",)),
        ),
    ),
    Stage("offload", (Job("offload", "speed:offload", 60), Job("fingerprints", "speed:fingerprints", 40))),
    Stage(
        "vllm",
        (
            Job("vLLM loads", "vllm_kit:unpack", 60),
            Job("vLLM, eager", "vllm_kit:check_engine", 200, ("eager",)),
            Job("vLLM, GRPO", "vllm_kit:check_grpo", 130),
            Job("vLLM, graphs", "vllm_kit:check_engine", 200, ("graphs",)),
            Job("vLLM, tests", "vllm_kit:run_tests", 110),
        ),
    ),
)


class Results:
    """The files of the results, to which everything is added at once."""

    def __init__(self, folder: Path, heading: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.began, self.lock, self.failures = folder, time.monotonic(), threading.Lock(), 0
        for name in ("table.md", "rows.jsonl", "log.txt"):
            (folder / name).write_text("")
        self._append("table.md", "\n".join([*heading, "", "| stage | what | result | |", "|---|---|---|---|"]))

    def add(
        self, stage: str, name: str, value: str, note: str = "", ok: bool = True, numbers: Mapping[str, float] | None = None
    ) -> None:
        cells = [cell.replace("|", "/").replace("\n", " ") for cell in (stage, name, value, note)]
        row = {
            "stage": stage,
            "at": round(time.monotonic() - self.began, 1),
            "name": name,
            "value": value,
            "note": note,
            "ok": ok,
        }
        with self.lock:
            self.failures += not ok
            self._append("rows.jsonl", json.dumps({**row, "numbers": numbers or {}}))
            self._append("table.md", f"| {' | '.join(cells)} |")
            print(f"[{row['at']:5.0f} s] " + "; ".join(cell for cell in cells if cell), flush=True)

    def log(self, job: str, line: str) -> None:
        with self.lock:
            self._append("log.txt", f"[{job}] {line}")

    def _append(self, name: str, text: str) -> None:
        with open(self.folder / name, "a") as file:
            file.write(text + "\n")


class JobProcess:
    """A started job, which waits for ``run``. Its rows and its log are added as they come."""

    def __init__(self, stage: str, job: Job, options: Sequence[str], results: Results) -> None:
        self.stage, self.job, self.results, self.last_line = stage, job, results, ""
        command = [sys.executable, "-u", str(Path(__file__).with_name("job.py")), *options, job.name, job.function, "--"]
        self.process = subprocess.Popen(
            [*command, *job.arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all it starts ends with it
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(ROW):
                self.results.add(self.stage, **json.loads(line.removeprefix(ROW)))
            elif line.strip():
                self.last_line = line.strip()
                self.results.log(self.job.name, line.rstrip())

    def run(self, limit: float) -> None:
        """Let it begin, and wait for its end."""
        reason = ""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{time.time() + limit}\n")
            self.process.stdin.close()
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit:.0f} s"
        except OSError:
            pass  # it is dead; its exit code says so
        self.kill()
        self.reader.join(5)
        if not reason and self.process.returncode:
            reason = f"its process ended with exit code {self.process.returncode}"
        if reason:
            self.results.add(self.stage, self.job.name, f"failed: {reason}", f"last line: {self.last_line:.150}", False)

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Schedule:
    """Runs stages in order until the time is up, with some processes of later jobs started ahead."""

    def __init__(
        self, stages: Sequence[Stage], options: Sequence[str], results: Results, *, seconds: float, slower: float, ahead: int
    ):
        self.stages, self.options, self.results, self.slower, self.ahead = stages, options, results, slower, ahead
        self.end = time.monotonic() + seconds
        self.later = [(stage.name, job) for stage in stages for job in stage.jobs]
        self.started: dict[Job, JobProcess] = {}
        self.lock = threading.Lock()

    def run(self) -> None:
        for stage in self.stages:
            began = time.monotonic()
            with ThreadPoolExecutor((os.cpu_count() or 1) if stage.together else 1) as pool:
                list(pool.map(self._run_job, [stage.name] * len(stage.jobs), stage.jobs))
            self.results.add(stage.name, "clock of this stage", f"{time.monotonic() - began:.0f} s")
        self.stop()

    def stop(self, *_: Any) -> None:
        """Begin nothing more, and end what runs."""
        self.end = 0.0
        for process in list(self.started.values()):
            process.kill()

    def _run_job(self, stage: str, job: Job) -> None:
        with self.lock:
            self.later.remove((stage, job))
            limit = min(job.limit * self.slower, self.end - time.monotonic())
            if limit >= LEAST_SECONDS:
                for place, each in [(stage, job), *self.later[: self.ahead]]:
                    if each not in self.started:
                        self.started[each] = JobProcess(place, each, self.options, self.results)
        if limit < LEAST_SECONDS:
            self.results.add(stage, job.name, "not run: no time was left")
            return
        self.started[job].run(limit)
        with self.lock:
            del self.started[job]


def unpack_wheels(folder: Path, site: Path) -> Path:
    """Wheels are archives of what is to be found on the path."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"there are no wheels in {folder}; python benchmarks/gpu/carry.py {folder} fetches them")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def describe_device(device: str) -> str | None:
    """Return what is measured; None if there is no GPU."""
    if device != "cuda":
        return f"a rehearsal at tiny sizes on {device} ({platform.machine()})"
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return " + ".join(done.stdout.splitlines()) or None


def find_commit(wheels: Path | None) -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    noted = None if wheels is None else wheels / "commit.txt"  # by carry.py, for a machine without git
    return noted.read_text().strip() if noted is not None and noted.exists() else "unknown commit"


def make_heading(described: str, commit: str) -> Iterator[str]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    yield f"### {time.strftime('%Y-%m-%d')}: what a GPU says of commit {commit}"
    yield ""
    yield f"- **Machine**: {described}; {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}."
    yield f"- **Command**: `python {' '.join(sys.argv)}`, commit {commit}."
    yield "- **Result**:"


def choose_stages(names: Sequence[str] | None, only: str, kit: Path | None) -> list[Stage]:
    """Return the stages in the order in which they are asked for, with the jobs whose name has ``only`` in it."""
    by_name = {stage.name: stage for stage in STAGES}
    chosen = [by_name[name] for name in names or by_name if name != "vllm" or kit is not None]
    kept = [replace(stage, jobs=tuple(job for job in stage.jobs if only in job.name)) for stage in chosen]
    return [stage for stage in kept if stage.jobs]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu", "sim"), help="cpu, sim: rehearse at tiny sizes (default: cuda)"
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, metavar="SECONDS", help="of all stages together (default: %(default)s)"
    )
    parser.add_argument(
        "--stages", nargs="+", choices=names, metavar="STAGE", help=f"in this order (default: {', '.join(names)})"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose name has this in it")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels that benchmarks/gpu/carry.py fetched")
    parser.add_argument(
        "--kit", type=Path, metavar="FOLDER", help="vLLM for this card with its checks: docs in benchmarks/README.md"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")), metavar="FOLDER", help="default: $OUT"
    )
    options = parser.parse_args(arguments)
    if "vllm" in (options.stages or ()) and options.kit is None:
        parser.error("--stages vllm needs --kit FOLDER")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    described = describe_device(options.device)
    if described is None:
        print("error: nvidia-smi finds no GPU here; --device cpu rehearses all of it at tiny sizes", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="strop-gpu-") as work:
        paths = [*FOLDERS]
        if options.wheels is not None:
            paths.append(str(unpack_wheels(options.wheels, Path(work, "site"))))
        sys.path[:0] = paths
        variables = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.update(variables, PYTHONPATH=os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
        shared = ["--device", options.device, "--work", work, "--out", str(options.out.resolve())]
        shared += [] if options.kit is None else ["--kit", str(options.kit.resolve())]
        results = Results(options.out, list(make_heading(described, find_commit(options.wheels))))
        stages, slower = (
            choose_stages(options.stages, options.only, options.kit),
            1 if options.device == "cuda" else REHEARSAL_LIMIT,
        )
        ahead = (os.cpu_count() or 1) // 2
        schedule = Schedule(stages, shared, results, seconds=options.budget, slower=slower, ahead=ahead)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, schedule.stop)
        schedule.run()
    print(f"{results.failures} rows failed; the table is in {options.out / 'table.md'}")
    return int(results.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
