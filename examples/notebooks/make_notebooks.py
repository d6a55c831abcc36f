"""Write a notebook for each kind of starter, from what ``strop init`` writes, so that the two cannot differ.

python examples/notebooks/make_notebooks.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from strop.extensions.starters.init_command import FOLDER, STARTERS

HERE = Path(__file__).parent
CHANCE = {
    "multi-turn": "0",
    "tools": "0",
    "agent": "0",
    "dpo": "1 in 2",
    "rm": "1 in 2",
}  # of the others 1 in 4: there are four teams
VALIDATED = 'run.validations[["accuracy", "low", "high", "tasks"]]'
EVALUATED = 'scores = strop.evaluate(config="eval.yaml"{model})\nscores.accuracy, scores.intervals["accuracy"]'


def training_call(name: str, command: str, argument: str = "") -> str:
    """Return the call that trains as ``NAME.yaml`` says, with the length of the run first among what a reader changes."""
    key, number = re.findall(r"^  (max_num_(?:steps|epochs)): (\d+)", (FOLDER / f"{name}.yaml").read_text(), re.MULTILINE)[0]
    return f'strop.train("{command}", config="{name}.yaml"{argument}, {command}={{"{key}": {number}}})'


def cells(kind: str) -> list[tuple[str, str]]:
    """Return (kind of cell, text) of the notebook of a starter."""
    starter = STARTERS[kind]
    config = starter.files[0]
    _, command, *_ = next(words for words in starter.commands if config in words).split()
    name = config.removesuffix(".yaml")
    code = [file for file in starter.files if file.endswith(".py")]
    opened = f'import os\nfrom pathlib import Path\n\nfrom strop.cli import main\n\nmain(["init", "{kind}", "{name}"])\nos.chdir("{name}")'
    shown = "\n".join(f'print(Path("{file}").read_text())' for file in (config, *code))
    title = f"# {starter.meaning[0].upper()}{starter.meaning[1:]}\n\nWhat `strop init {kind}` writes, from Python."
    begun = [
        ("markdown", title),
        ("code", opened),
        ("markdown", "The configuration, and the code that is yours:"),
        ("code", shown),
    ]
    if kind == "eval":
        return [*begun, ("code", "import strop\n\n" + EVALUATED.format(model="")), ("code", "scores.samples.head(8)")]
    trained = f"import strop\n\nrun = {training_call(name, command)}"
    if (stage := next((file for file in starter.files[1:] if file.endswith("sft.yaml")), None)) is not None:
        first = training_call(stage.removesuffix(".yaml"), "sft")
        taught, begin = "", ", model=first.model"
        if kind == "distillation":
            taught, begin = '\nteacher = {"model_name": str(first.model)}', ", teacher=teacher"
        trained = f"import strop\n\nfirst = {first}{taught}\nrun = {training_call(name, command, begin)}"
    found = VALIDATED
    if kind == "sft":
        found = EVALUATED.format(model=', generation={"model_name": str(run.model)}')
    elif kind in ("dpo", "rm"):
        found = 'run.validations["accuracy"]'
    scored = f"The accuracy on held-out rows (the run prints its 95 % interval too); chance is {CHANCE.get(kind, '1 in 4')}."
    last = [("code", "run.plot()")]
    if found == VALIDATED:
        last.append(("code", 'run.rollouts.nlargest(5, "reward")[["task_id", "completion", "reward"]]'))
    return [*begun, ("code", trained), ("markdown", scored), ("code", found), *last]


def notebook(kind: str) -> str:
    """Return the text of the .ipynb file of a starter."""
    made: list[dict[str, Any]] = []
    for place, (what, text) in enumerate(cells(kind)):
        cell: dict[str, Any] = {
            "cell_type": what,
            "id": f"{kind}-{place}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        made.append(cell if what == "markdown" else {**cell, "execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    for kind in STARTERS:
        (HERE / f"{kind.replace('-', '_')}.ipynb").write_text(notebook(kind), encoding="utf-8")
