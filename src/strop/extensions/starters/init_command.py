"""``strop init``: write a starter, a small configuration with sample data and, where one is needed, a reward or an environment."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR
from strop.user_code import suggest_names

FOLDER = Path(__file__).with_name("files")  # examples/starters in the repository


@dataclass(frozen=True)
class Starter:
    """The files of a starter, its configuration first, and commands to run with them."""

    meaning: str
    files: tuple[str, ...]
    commands: tuple[str, ...]


def _training(command: str, config: str, meaning: str, *files: str) -> Starter:
    train = f"strop {command} --config {config}.yaml"
    return Starter(meaning, (f"{config}.yaml", *files), (f"{train} --dry-run", train, f"strop plot logs/{config}"))


def _after_sft(command: str, config: str, first: str, last: int, meaning: str, *files: str) -> Starter:
    """A starter whose policy learns the form of an answer from a few recorded ones first, as a model this small needs it."""
    model = f"policy.model_name=results/{first}/step_{last}/policy/weights"
    commands = (
        f"strop {command} --config {config}.yaml --dry-run",
        f"strop sft --config {first}.yaml",
        f"strop {command} --config {config}.yaml {model}",
        f"strop plot logs/{config}",
    )
    return Starter(f"{meaning}, after a short SFT", (f"{config}.yaml", f"{first}.yaml", *files), commands)


TICKETS = ("tickets.jsonl", "tickets_test.jsonl", "prompt.txt", "reward.py")
SCORED = ("eval.yaml", *TICKETS[1:])  # to sample from a model that was trained on recorded answers


STARTERS = {
    "grpo": _after_sft("grpo", "grpo", "sft", 21, "GRPO on your own rows and reward function", *TICKETS, "answers.jsonl"),
    "multi-turn": _training("grpo", "multi_turn", "GRPO over several turns, with a tool", "sums.jsonl", "calculator.py"),
    "tools": _after_sft(
        "grpo",
        "tools",
        "tools_sft",
        12,
        "GRPO with your own functions as tools",
        "sums.jsonl",
        "tools.py",
        "tools.jinja",
        "calls.jsonl",
    ),
    "agent": _training("grpo", "agent", "GRPO of an agent that uses OpenAI's API", "sums.jsonl", "agent.py"),
    "ppo": _after_sft("ppo", "ppo", "sft", 21, "PPO, with a critic, on your own rows", *TICKETS, "answers.jsonl"),
    "distillation": Starter(
        "learning from a teacher on your own rows, after its short SFT",
        ("distillation.yaml", "sft.yaml", *TICKETS, "answers.jsonl"),
        (
            "strop sft --config sft.yaml",
            "strop distillation --config distillation.yaml --dry-run",
            "strop distillation --config distillation.yaml",
            "strop plot logs/distillation",
        ),
    ),
    "sft": Starter(
        "supervised fine-tuning on your own answers",
        ("sft.yaml", "answers.jsonl", *SCORED),
        (
            "strop sft --config sft.yaml --dry-run",
            "strop sft --config sft.yaml",
            "strop plot logs/sft",
            "strop eval --config eval.yaml generation.model_name=results/sft/step_21/policy/weights",
        ),
    ),
    "dpo": _training("dpo", "dpo", "DPO on your own preferences", "preferences.jsonl", "prompt.txt"),
    "rm": _training("rm", "rm", "a reward model from your own preferences", "preferences.jsonl", "prompt.txt"),
    "eval": Starter(
        "evaluation of a model on your own rows and reward function",
        SCORED,
        ("strop eval --config eval.yaml --dry-run", "strop eval --config eval.yaml"),
    ),
}


def init(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop init``. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="strop init",
        description="Write a small commented configuration with sample data, ready to train. Nothing is overwritten.",
        epilog=_list_kinds(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(STARTERS)}; without it they are listed")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."), metavar="FOLDER", help="where to (default: here)")
    parser.add_argument("--model", metavar="NAME", help="the model of the configuration: a name on the hub, or a folder")
    options = parser.parse_intermixed_args(arguments)
    if options.kind is None:
        print(_list_kinds())
        return 0
    if options.kind not in STARTERS:
        print(f"error: there is no starter {options.kind!r}{suggest_names(options.kind, STARTERS)}", file=sys.stderr)
        return USAGE_ERROR
    starter = STARTERS[options.kind]
    contents = {options.folder / name: _read(name, options.model) for name in starter.files}
    try:
        if taken := [str(path) for path, text in contents.items() if path.exists() and path.read_bytes() != text]:
            print(
                f"error: {', '.join(taken)} is there already, with other contents, and strop init overwrites nothing; "
                f"name another folder: strop init {options.kind} FOLDER",
                file=sys.stderr,
            )
            return USAGE_ERROR
        options.folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            if not path.exists():
                with path.open("xb") as file:
                    file.write(text)
    except OSError as error:
        print(f"error: {options.folder} cannot be written: {error}", file=sys.stderr)
        return 1
    print(_describe(starter, options.folder))
    return 0


def _list_kinds() -> str:
    rows = "\n".join(f"  {kind:<14}{starter.meaning}" for kind, starter in STARTERS.items())
    return f"strop init KIND [FOLDER] [--model NAME] writes one of:\n{rows}"


def _read(name: str, model: str | None) -> bytes:
    """Return a file of the starters. A configuration gets the model's name; a teacher that another one trains stays."""
    text = (FOLDER / name).read_bytes()
    if model is None or not name.endswith(".yaml"):
        return text
    named = model if re.fullmatch(r"[A-Za-z/][\w./-]*", model) else json.dumps(model)
    return re.sub(rb"(?m)(^  model_name: )(?!results/)\S+", lambda found: found[1] + named.encode(), text)


def _describe(starter: Starter, folder: Path) -> str:
    enter = () if folder == Path(".") else (f"cd {folder}",)
    commands = "\n".join(f"  {command}" for command in (*enter, *starter.commands))
    where = "this folder" if folder == Path(".") else folder
    return f"{', '.join(starter.files)} are in {where}.\nNext:\n{commands}\nThen put your own in place of {', '.join(starter.files[1:])}."


INIT = Command(init, "write a starter: configuration, sample data, a reward or a tool", group="start")
