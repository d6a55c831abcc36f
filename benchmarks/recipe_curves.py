"""Run the recipes of examples/recipes with SmolLM2-135M, and write the curve.png and expected.json of each: an hour on two cores.

    python benchmarks/recipe_curves.py FOLDER [--only math,code] [--seeds 42,2]     # runs what is missing in FOLDER

The commands are those of each README.md. A finished run is not repeated, so that a picture alone is drawn again in seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

import strop

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
Expected = Mapping[
    str, Mapping[str, Sequence[float]]
]  # of a stage and a seed: step to accuracy, low, high, minutes since the start


def commands(recipe: Path) -> list[list[str]]:
    """Return the commands that train or evaluate, from the first block of the README."""
    text = BLOCK.findall((recipe / "README.md").read_text(encoding="utf-8"))[0].replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[1:] for words in found if words[:1] == ["strop"] and "--config" in words and "--dry-run" not in words]


def run(recipe: Path, folder: Path, seed: int) -> None:
    """Run a recipe with a seed, in a copy of its folder."""
    if not folder.is_dir():
        shutil.copytree(recipe, folder, symlinks=False)
    for words in commands(recipe):
        seeded = [] if words[0] == "eval" else [f"{words[0]}.seed={seed}"]
        program = str(Path(sys.executable).with_name("strop"))
        done = subprocess.run([program, *words, *seeded], cwd=folder, check=False)
        if done.returncode:
            raise SystemExit(f"strop {' '.join(words)} ended with {done.returncode} in {folder}")


def read(folder: Path, seed: int) -> dict[str, dict[str, list[float]]]:
    """Return the validations of each stage with sampled answers."""
    found = {}
    for logs in sorted((folder / "logs").iterdir(), key=lambda path: path.stat().st_ctime):
        trained = strop.Run(logs)
        if "low" not in trained.validations:
            continue
        minutes = trained.timing["total_step_time"].cumsum() / 60
        found[f"{logs.name}, seed {seed}"] = {
            str(step): [round(float(row[name]), 4) for name in ("accuracy", "low", "high")]
            + [round(float(minutes[:step].iloc[-1]) if step else 0.0, 1)]
            for step, row in trained.validations.iterrows()
        }
    return found


def draw(expected: Expected, file: Path) -> None:
    """Draw the accuracy on held-out tasks over the steps, with its 95 % intervals."""
    figure = Figure(figsize=(5.2, 2.8), layout="constrained")
    axes = figure.subplots()
    for label, points in expected.items():
        steps = [int(step) for step in points]
        values = [row[0] for row in points.values()]
        below = [row[0] - row[1] for row in points.values()]
        above = [row[2] - row[0] for row in points.values()]
        axes.errorbar(steps, values, yerr=[below, above], marker="o", capsize=3, label=label)
    axes.set_xlabel("step", fontsize=9)
    axes.set_title("accuracy on held-out tasks", fontsize=9)
    axes.set_ylim(-0.03, 1.03)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def table(expected: Expected) -> str:
    """Return the table of a README: before and after, with 95 % intervals."""
    rows = ["| run | before | after | steps | minutes of training |", "|---|---|---|---|---|"]
    for label, points in expected.items():
        first, last = next(iter(points.values())), list(points.values())[-1]
        scores = [f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high, _ in (first, last)]
        rows.append(f"| {label} | {scores[0]} | {scores[1]} | {list(points)[-1]} | {last[3]:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[42, 2])
    options = parser.parse_args()
    for readme in sorted(RECIPES.glob("*/README.md")):
        recipe = readme.parent
        if options.only and recipe.name not in options.only:
            continue
        expected: dict[str, dict[str, list[float]]] = {}
        for seed in options.seeds:
            folder = options.folder / f"{recipe.name}-{seed}"
            run(recipe, folder, seed)
            expected |= read(folder, seed)
        (recipe / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
        draw(expected, recipe / "curve.png")
        print(f"{recipe.name}\n{table(expected)}\n")


if __name__ == "__main__":
    main()
