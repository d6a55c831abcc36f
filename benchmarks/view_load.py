"""How long `strop view` takes to show millions of stored rollouts, and in how much memory.

    python benchmarks/view_load.py --steps 10000 --rollouts 512

writes a made-up run of files with the real schema (a few different ones, copied), starts the view's own server in a process, and asks
it what the page asks: without an index, while the index is made, and with it. It prints one JSON object a measurement.
`--keep FOLDER` leaves the run there, and takes it up again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

DIFFERENT = 20  # files that are made; the others are copies under other steps
TOKENS = 24  # sampled in a rollout, on average


def write_run(folder: Path, steps: int, rollouts: int) -> None:
    """Write the run, unless it is there."""
    from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
    from strop.monitoring.rollout_store.rollout_store import RolloutStore

    done = folder / "rollouts" / f"step_{steps:06d}.parquet"
    if done.exists():
        return
    chance = random.Random(0)

    def make(step: int, index: int) -> RolloutRecord:
        count = chance.randint(1, 2 * TOKENS)
        logprobs = tuple(-chance.random() for _ in range(count))
        text = f"step {step} thinks of {chance.randint(0, 10**6)} and answers {chance.randint(0, 99)}. " * 3
        turn = TurnRecord(role="assistant", text=text, start=0, end=count, sampled=True, versions=(step,))
        return RolloutRecord(
            step=step, group=index // 8, environment="arithmetic", task_id=f"sum:{step % 7}:{index // 8}", sample=index % 8,
            prompt="What is it?", completion=text, prompt_tokens=tuple(range(20)),
            tokens=tuple(chance.randrange(50_000) for _ in range(count)),
            sampled=(True,) * count, sampler_logprobs=logprobs, learner_logprobs=logprobs, versions=(step,) * count,
            advantage=chance.gauss(0, 1), reward=float(chance.random() < 0.5), rewards={"correct": 1.0},
            ending="stop" if chance.random() < 0.9 else "length", error=None, kept=True, dropped_because=None, answer="42",
            prompt_messages=({"role": "user", "content": "What is it?"},), turns=(turn,),
        )  # fmt: skip

    store = RolloutStore(folder)
    for step in range(1, min(DIFFERENT, steps) + 1):
        store.write(step, [make(step, index) for index in range(rollouts)])
    for step in range(DIFFERENT + 1, steps + 1):
        name = "step_{:06d}.parquet"
        shutil.copyfile(folder / "rollouts" / name.format(step % DIFFERENT + 1), folder / "rollouts" / name.format(step))
    names = [f"train/metric_{number}" for number in range(60)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: chance.random() for name in names}
            file.write(json.dumps({"step": step, **values, "timing/train/total_step_time": 1.0}) + "\n")
    (folder / "config.yaml").write_text("grpo:\n  seed: 1\n")
    (folder / "config_history.jsonl").write_text('{"from_step": 1, "time": "", "config": {"grpo": {"seed": 1}}}\n')


class Server:
    """The view's server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        started = time.perf_counter()
        command = [sys.executable, "-m", "strop", "view", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = ""
        while not address:
            line = self.process.stdout.readline()
            assert line, "the view did not start"
            address = line.partition("Open ")[2].strip()
        self.base, _, self.token = address.partition("?token=")
        self.seconds_to_start = time.perf_counter() - started

    def ask(self, path: str) -> tuple[Any, float]:
        """Return an answer and the seconds that it took."""
        request = urllib.request.Request(f"{self.base}api/{path}", headers={"Authorization": f"Bearer {self.token}"})
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            content = answer.read()
        return json.loads(content), time.perf_counter() - started

    def memory(self) -> dict[str, float]:
        """Return the resident memory of the server in MiB: now and at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return {
            name: int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for name, key in (("mib", "VmRSS"), ("peak_mib", "VmHWM"))
        }  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def report(what: str, seconds: float, **more: Any) -> None:
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in more.items()}
    print(json.dumps({"what": what, "seconds": round(seconds, 3), **rounded}), flush=True)


def open_page(server: Server, run: str, when: str) -> None:
    """Ask what the page asks until it shows the newest rollouts, and one of them."""
    report(f"{when}: the server starts", server.seconds_to_start)
    total = server.seconds_to_start
    for what, path in (
        ("list of runs", "runs"),
        ("names of metrics", f"runs/{run}/metrics"),
        ("two curves", f"runs/{run}/metrics?names=train/metric_0,train/metric_1"),
        ("newest rollouts", f"runs/{run}/rollouts?limit=50"),
    ):
        answer, seconds = server.ask(path)
        total += seconds
        report(f"{when}: {what}", seconds, **server.memory())
    report(f"{when}: from the command to the newest rollouts", total)
    row = answer["rows"][0]
    report(f"{when}: one rollout", server.ask(f"runs/{run}/rollouts/{row['step']}/{row['group']}/{row['sample']}")[1])


def browse(server: Server, run: str, steps: int, when: str) -> None:
    count = server.ask(f"runs/{run}/rollouts?limit=1")[0]["total"]
    for what, query in (
        ("a page, first time", "sort=-step&from=0&limit=50"),
        ("a page in the middle", f"sort=-step&from={count // 2}&limit=50"),
        ("the last page", f"sort=-step&from={count - 50}&limit=50"),
        ("by reward, first time", "sort=-reward&limit=50"),
        ("by reward, a page in the middle", f"sort=-reward&from={count // 2}&limit=50"),
        ("filter of three", "ending=length&reward_min=1&tokens_min=40&limit=50"),
        ("a range of steps by length", f"steps={steps // 4}-{steps // 2}&sort=-tokens&limit=50"),
        ("text in one step", f"step={steps // 2}&text=answers&limit=50"),
    ):
        answer, seconds = server.ask(f"runs/{run}/rollouts?{query}")
        report(f"{when}: {what}", seconds, total=answer["total"], **server.memory())
    answer, seconds = server.ask(f"runs/{run}/rollouts?text=nowhere&limit=50")
    report(f"{when}: text in all steps, one request", seconds, searched=answer["searched"], **server.memory())
    report(f"{when}: tasks", server.ask(f"runs/{run}/tasks?limit=50")[1], **server.memory())


def measure_without_index(folder: Path) -> None:
    shutil.rmtree(folder / "rollouts" / "index", ignore_errors=True)
    server = Server(folder)
    try:
        open_page(server, folder.name, "without an index")
        started = time.perf_counter()
        while not server.ask(f"runs/{folder.name}/rollouts?limit=1")[0]["indexed"]["complete"]:
            time.sleep(1)
        report("the index is made", time.perf_counter() - started, **server.memory())
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=512, help="of each step")
    parser.add_argument("--keep", type=Path, help="folder of the run")
    parser.add_argument("--indexed", action="store_true", help="only with the index that an earlier call with --keep made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)) / "made-up"
        started = time.perf_counter()
        write_run(folder, options.steps, options.rollouts)
        report("the run is written", time.perf_counter() - started)
        if not options.indexed:
            measure_without_index(folder)
        index = sum(path.stat().st_size for path in (folder / "rollouts" / "index").iterdir()) / 2**20
        stored = sum(entry.stat().st_size for entry in os.scandir(folder / "rollouts") if entry.is_file()) / 2**20
        server = Server(folder)
        try:
            open_page(server, folder.name, "with an index")
            started = time.perf_counter()
            while not server.ask(f"runs/{folder.name}/rollouts?limit=1")[0]["indexed"]["complete"]:
                time.sleep(0.1)
            report("the index is read", time.perf_counter() - started, index_mib=index, rollouts_mib=stored, **server.memory())
            browse(server, folder.name, options.steps, "with an index")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
