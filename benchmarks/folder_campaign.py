"""Folders under attack: two runs in one folder, full disks, read-only folders, damaged checkpoints; what a user is told and what is left.

    python benchmarks/folder_campaign.py --output campaign.json                       # about a quarter of an hour on two cores
    python benchmarks/folder_campaign.py --parts damage --output damage.json

Each run is the ``strop`` command on a tiny model. Full and read-only disks are small file systems in memory (tmpfs), which root may mount;
without that right the parts ``full`` and ``refused`` are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.runs import Outcome, Running, metrics_of, overrides, repeatable, start, tiny_config
from loop.tiny import build_tiny
from strop.monitoring.rollout_store.rollout_store import RolloutStore

PARTS = ("two", "full", "refused", "damage")
STEPS = 6
CHANGES = {"logger.console": "plain", "grpo.val_period": 0, "checkpointing.metric_name": None}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: _flip(path),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path: path.unlink(),
}


def launch(model: Path, folder: Path, **changes: Any) -> Running:
    return start(["grpo", *overrides(tiny_config(model, **{**CHANGES, **changes}))], folder)


def complaint(outcome: Outcome) -> str:
    """Return the error, or else the last warning, of a run."""
    lines = [line for line in (outcome.err + outcome.out).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    warnings = [line for line in lines if "warning" in line.lower()]
    traceback = ["TRACEBACK"] if "Traceback" in outcome.err else []
    return " / ".join([*traceback, *(errors or warnings[:2])])


def same_records(folder: Path, wanted: Path) -> str | None:
    """Return how the records of a run differ from those of an undisturbed one, or None."""
    if repeatable(metrics_of(folder / "logs")) != repeatable(metrics_of(wanted / "logs")):
        return "metrics differ"
    if list(RolloutStore(folder / "logs").read_all()) != list(RolloutStore(wanted / "logs").read_all()):
        return "rollouts differ"
    names = [sorted(path.name for path in (place / "results").iterdir()) for place in (folder, wanted)]
    if names[0] != names[1]:
        return f"results hold {names[0]}, not {names[1]}"
    newest = f"results/step_{STEPS}/policy/weights/model.safetensors"
    if (folder / newest).read_bytes() != (wanted / newest).read_bytes():
        return "weights differ"
    left = [path.name for place in ("logs", "results") for path in (folder / place).iterdir() if _is_leftover(path.name)]
    return f"left over: {left}" if left else None


def _is_leftover(name: str) -> bool:
    return name.startswith((".tmp", ".strop", "previous_")) or name.endswith(".tmp")


def undisturbed(model: Path, folder: Path, **changes: Any) -> tuple[Path, float]:
    started = time.monotonic()
    outcome = launch(model, folder, **changes).finish()
    assert outcome.code == 0, outcome.err
    return folder, time.monotonic() - started


# --- two runs in one folder -------------------------------------------------------------------------------------------------


def run_two(model: Path, folder: Path, rounds: int, draw: random.Random) -> list[dict[str, Any]]:
    """Start two runs of other seeds in one folder, the second at a random moment of the first."""
    wanted = {seed: undisturbed(model, folder / f"seed_{seed}", **{"grpo.seed": seed}) for seed in (1, 2)}
    duration, rows = wanted[1][1], []
    while len(rows) < rounds:
        place = folder / f"two_{len(rows)}"
        offset = draw.choice((0.0, draw.uniform(0, 0.2), draw.uniform(0, 0.8 * duration)))
        first = launch(model, place, **{"grpo.seed": 1})
        time.sleep(offset)
        over = not first.process.is_alive()
        (place / "second").mkdir(parents=True, exist_ok=True)
        shared = {"logger.log_dir": str(place / "logs"), "checkpointing.checkpoint_dir": str(place / "results")}
        second = launch(model, place / "second", **{"grpo.seed": 2}, **shared)
        outcomes = {1: first.finish(), 2: second.finish()}
        goes_on = [seed for seed, outcome in outcomes.items() if outcome.code == 0]
        row: dict[str, Any] = {"offset": offset, "goes_on": goes_on, "codes": [outcome.code for outcome in outcomes.values()]}
        if over or (len(goes_on) == 2 and "continuing after step" in outcomes[2].out):
            shutil.rmtree(place)
            continue  # the first was done: these are two runs one after the other
        refused = [outcome for outcome in outcomes.values() if outcome.code != 0]
        row["said"] = complaint(refused[0]) if refused else ""
        row["wrong"] = same_records(place, wanted[goes_on[0]][0]) if len(goes_on) == 1 else "not exactly one went on"
        if len(goes_on) == 1 and not any(text in row["said"] for text in ("is in use by another run", "holds another run")):
            row["wrong"] = f"the other one says: {row['said']}"
        rows.append(row)
        if row["wrong"] is None:
            shutil.rmtree(place)
        print(
            f"two {len(rows)}/{rounds}: after {offset:.2f} s, {goes_on} goes on, {row['wrong'] or 'as an undisturbed run'}",
            flush=True,
        )
    return rows


# --- full disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def resize(place: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "trial", 1 << 20):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def tree_size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def run_full(model: Path, folder: Path, points: int, draw: random.Random) -> list[dict[str, Any]]:
    """Let the disk of checkpoints, or of logs, fill up at random sizes; give it room later."""
    long = {"grpo.max_num_steps": 2 * STEPS}
    wanted = {"results": undisturbed(model, folder / "results")[0], "logs": undisturbed(model, folder / "logs", **long)[0]}
    rows = []
    for point in range(points):
        part = "results" if point % 2 == 0 else "logs"
        place = folder / f"full_{point}"
        changes = long if part == "logs" else {}
        newest = wanted["results"] / "results" / f"step_{STEPS}"
        largest = 3.2 * tree_size(newest) if part == "results" else 0.8 * tree_size(wanted["logs"] / "logs")
        size = 4096 * draw.randint(25, int(largest) // 4096)
        row: dict[str, Any] = {"disk of": part, "bytes": size}
        with small_disk(place / part, size):
            running = launch(model, place, **changes)
            deadline = time.monotonic() + 100
            while part == "logs" and running.process.is_alive() and time.monotonic() < deadline:
                if "until there is room" in _read(place / ".err") or "when there is room" in _read(place / ".err"):
                    time.sleep(draw.uniform(0, 0.5))
                    resize(place / part, 1 << 28)
                    break
                time.sleep(0.02)
            outcome = running.finish()
            row |= {"code": outcome.code, "said": complaint(outcome)}
            row["left"] = sorted(path.name for path in (place / "results").iterdir())
            row["drafts"] = [name for name in row["left"] if name.startswith(".tmp")]
            logged = list(metrics_of(place / "logs")) if (place / "logs" / "metrics.jsonl").exists() else []
            if outcome.code == 0 or part == "logs":
                row["steps"] = logged
            resize(place / part, 1 << 28)
            lost = "could not be written" in outcome.err or "are lost" in outcome.err  # records, and it said so
            again = launch(model, place, **changes).finish() if outcome.code != 0 or lost else outcome
            row["with room"] = again.code
            row["wrong"] = "with room it fails" if again.code != 0 else _ignoring_failures(place, wanted[part], lost)
            if row["drafts"] or "TRACEBACK" in row["said"]:
                row["wrong"] = f"{row['drafts']} {row['said'][:200]}"
        rows.append(row)
        print(
            f"full {point + 1}/{points}: {part} of {size}: {row['code']}, {row['said'][:300]}; {row['wrong'] or 'nothing lost'}",
            flush=True,
        )
    return rows


def _ignoring_failures(folder: Path, wanted: Path, lost: bool) -> str | None:
    """Compare what was trained: a checkpoint that failed is saved at another step, and says so in the metrics.

    ``lost``: the run said that records had no room, and which."""
    found, other = (repeatable(metrics_of(place / "logs")) for place in (folder, wanted))
    for line in found.values():
        line.pop("train/checkpoint_failed", None)
    if found != ({step: other[step] for step in found} if lost else other):
        return f"metrics differ: steps {list(found)}"
    if not lost and list(RolloutStore(folder / "logs").read_all()) != list(RolloutStore(wanted / "logs").read_all()):
        return "rollouts differ"
    newest = f"results/step_{max(other)}/policy/weights/model.safetensors"
    return None if (folder / newest).read_bytes() == (wanted / newest).read_bytes() else "weights differ"


# --- folders that refuse ----------------------------------------------------------------------------------------------------


def run_refused(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Try each folder that a run writes read-only, as a file and as a dangling link."""
    tensorboard = {"logger.tensorboard_enabled": True, "logger.tensorboard.log_dir": "board"}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "logger.log_dir": ("logs", {}),
        "checkpointing.checkpoint_dir": ("results", {}),
        "logger.tensorboard.log_dir": ("board", tensorboard),
    }
    rows = []
    for number, (key, (name, changes)) in enumerate(cases.items()):
        for what in ("read-only", "full", "a file", "a dangling link"):
            place = folder / f"refused_{number}_{what.replace(' ', '_')}"
            place.mkdir()
            row: dict[str, Any] = {"folder": key, "is": what}
            started = time.monotonic()
            if what in ("read-only", "full"):
                with small_disk(place / name, 1 << 16):
                    if what == "full":
                        _fill(place / name)
                    else:
                        subprocess.run(["mount", "-o", "remount,ro", str(place / name)], check=True)
                    outcome = launch(model, place, **changes).finish()
            else:
                (place / name).write_text("mine") if what == "a file" else (place / name).symlink_to(place / "nowhere")
                outcome = launch(model, place, **changes).finish()
            row |= {"code": outcome.code, "said": complaint(outcome), "seconds": round(time.monotonic() - started, 1)}
            row["wrong"] = None if outcome.code == 1 and key in row["said"] and "TRACEBACK" not in row["said"] else "no message"
            rows.append(row)
            print(f"{key} {what}: {row['said'][:300]}; {row['wrong'] or 'refused'}", flush=True)
    return rows


def _fill(place: Path) -> None:
    try:
        with (place / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        return


# --- damaged checkpoints ----------------------------------------------------------------------------------------------------


def run_damage(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Damage each file of the newest checkpoint in each way, and continue the run."""
    source = folder / "whole"
    undisturbed(model, source, **{"checkpointing.keep_top_k": 2})
    rows = []
    newest = source / "results" / f"step_{STEPS}"
    for file in sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file()):
        for what, damage in DAMAGES.items():
            place = folder / f"damage_{len(rows)}"
            shutil.copytree(source, place)
            damage(place / "results" / newest.name / file)
            outcome = launch(model, place, **{"checkpointing.keep_top_k": 2, "grpo.max_num_steps": STEPS + 1}).finish()
            said = complaint(outcome)
            row = {"file": str(file), "is": what, "code": outcome.code, "said": said.replace(f"{place}/", "")}
            named = file.name in said
            row["wrong"] = None if named and "TRACEBACK" not in said else "the file is not named"
            if outcome.code != 0 and f"step_{STEPS - 2} is whole" not in said:
                row["wrong"] = "no older checkpoint is offered"
            rows.append(row)
            shutil.rmtree(place)
            print(f"{file} {what}: {outcome.code} {row['said'][:200]}; {row['wrong'] or 'named'}", flush=True)
    return rows


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def summarize(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for part, rows in results.items():
        wrong = [row for row in rows if row["wrong"]]
        lines.append(f"{part}: {len(rows)} cases, {len(wrong)} not as promised")
        lines += [f"    {json.dumps(row)[:400]}" for row in wrong]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=50, help="pairs of runs in one folder")
    parser.add_argument("--points", type=int, default=20, help="sizes of a full disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    draw, results = random.Random(options.seed), {}
    with tempfile.TemporaryDirectory(prefix="strop-folders-") as temporary:
        folder = Path(temporary)
        model = build_tiny(folder / "model")
        mounts = can_mount(folder)
        for part in options.parts:
            place = folder / part
            place.mkdir()
            if part in ("full", "refused") and not mounts:
                print(f"{part}: skipped, because file systems cannot be mounted here (it needs root)")
                continue
            results[part] = {
                "two": lambda place=place: run_two(model, place, options.rounds, draw),
                "full": lambda place=place: run_full(model, place, options.points, draw),
                "refused": lambda place=place: run_refused(model, place),
                "damage": lambda place=place: run_damage(model, place),
            }[part]()
            if options.output:
                options.output.write_text(json.dumps(results, indent=1))
    print(re.sub(r"/tmp/[^ /]+", "", summarize(results)))
    return int(any(row["wrong"] for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
