"""``strop replay`` and ``strop ledger``."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands import Command
from strop.cli.output import OVERRIDES_HELP, USAGE_ERROR, RunParser, find_log_folder, plain_warnings, print_interrupted

if TYPE_CHECKING:
    from strop.extensions.replay.token_ledger import TokenLedger


def replay(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop replay``. Return its exit code: 1 if a replay without overrides does not reproduce what was logged."""
    options = make_parser().parse_intermixed_args(arguments)
    try:
        with plain_warnings():
            return _replay(options)
    except KeyboardInterrupt:
        return print_interrupted(f"Nothing was stored. A replay starts from the beginning:\n    {command_line}")


def _replay(options: argparse.Namespace) -> int:
    import asyncio

    from strop.config import ConfigError
    from strop.extensions.replay.replay import format_replay, store_replay
    from strop.extensions.replay.replay import replay as replay_run

    try:
        folder = find_log_folder(options.run)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give the log folder of a run (logger.log_dir)")
        work = replay_run(folder, options.step, options.overrides, note=_print_note)
        result = asyncio.run(work)
        stored = store_replay(folder, result) if options.store else None
    except (ConfigError, ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print("\n".join(format_replay(result)))
        if stored is not None:
            print(f"\nstored in {stored}")
    return 1 if result.failed else 0


def _print_note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop replay",
        description="Train a step of a run again, from its checkpoint and what it trained on, as it was or under another algorithm, clip, "
        "correction or learning rate, and compare. Nothing of the run changes.",
        epilog="A step begins with the weights of the step before, so its checkpoint is needed (checkpointing.save_period=1 keeps all); "
        "step 1 begins with the initial model.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the training step")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=OVERRIDES_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the result is stored in replays/ of the log folder, for the page (default: yes)",
    )
    return parser


REPLAY = Command(replay, "train a step again, as it was or with other settings", group="look")


TEXT_WIDTH = 14  # characters of a token
SHOWN = {  # heading -> column of the ledger
    "sampler": "sampler_logprobs",
    "trained": "trained_logprobs",
    "ratio": "ratio",
    "entropy": "entropy",
    "advantage": "token_advantages",
    "weight": "correction",
}


def ledger(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop ledger``. Return its exit code."""
    options = make_ledger_parser().parse_args(arguments)
    from strop.extensions.replay.token_ledger import find_rollout, make_ledger

    try:
        folder = find_log_folder(options.run)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give the log folder of a run (logger.log_dir)")
        found = make_ledger(folder, options.step, *find_rollout(folder, options.step, options.rollout))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(json.dumps(found.to_dict(), ensure_ascii=True, allow_nan=False))
    elif options.csv:
        _write_csv(found)
    else:
        decode = None if options.ids else _load_decoder(folder)
        print("\n".join(format_ledger(found, decode)))
    return 0


def make_ledger_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop ledger",
        description="Show what each term of the loss contributed at each token of a stored rollout, and its share of the gradient.",
        epilog="The sum over all rollouts of a step is its train/loss. docs/ledger.md says what each column is.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("step", type=int, metavar="STEP", help="the training step")
    parser.add_argument("rollout", metavar="ROLLOUT", help="GROUP/SAMPLE or TASK/SAMPLE, as strop rollouts lists them")
    parser.add_argument("--ids", action="store_true", help="show token ids instead of their texts; loads no tokenizer")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print one line of CSV for each token")
    return parser


def format_ledger(found: TokenLedger, decode: Callable[[int], str] | None = None) -> Iterator[str]:
    """Yield the lines of the ledger as a table, and the sums below it."""
    from strop.safety.printable import make_printable

    advantage = "" if found.advantage is None else f", advantage {found.advantage:.4g}"
    yield make_printable(f"step {found.step}, task {found.task_id}, rollout {found.group}/{found.sample}{advantage}")
    if found.note:
        yield f"note: {found.note}"
    rows = found.rows()
    shown = {heading: name for heading, name in SHOWN.items() if rows and name in rows[0]}
    headings = ["", "token", *shown, *found.terms, *(["gradient", "share"] if found.share else []), ""]
    texts = [str(row["token"]) if decode is None else _shorten(decode(row["token"])) for row in rows]
    lines = [headings, *(_format_row(row, text, found, list(shown.values())) for row, text in zip(rows, texts, strict=True))]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headings))]
    for line in lines:
        cells = [
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join([*cells[:-1], line[-1]]).rstrip()
    yield from _format_sums(found)


def _format_row(row: Mapping[str, Any], text: str, found: TokenLedger, shown: Sequence[str]) -> list[str]:
    numbers = [_number(row[name]) if row["sampled"] else "" for name in shown]
    terms = [_number(row[name]) if row["sampled"] else "" for name in found.terms]
    share = (
        [_number(row["gradient"]), f"{row['share']:.3%}"] if found.share and row["sampled"] else ["", ""] if found.share else []
    )
    reason = row.get("mask_reason") or ("clipped" if row.get("clipped") else "")
    return [str(row["position"]), text, *numbers, *terms, *share, reason]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _format_sums(found: TokenLedger) -> Iterator[str]:
    if not found.terms:
        return
    yield ""
    yield "sum over this rollout:  " + ", ".join(f"{name} {value:.6g}" for name, value in found.totals.items())
    yield "sum over the step:      " + ", ".join(f"{name} {value:.6g}" for name, value in found.step_totals.items())
    yield f"share of the step's gradient: {sum(found.share):.3%}"
    for name, value in found.logged.items():
        yield f"logged {name}: {value:.9g}"
    if found.difference is not None:
        yield f"the terms of the step less train/loss: {found.difference:.2g}"


def _shorten(text: str) -> str:
    shown = ascii(text)[1:-1]
    return shown if len(shown) <= TEXT_WIDTH else shown[: TEXT_WIDTH - 2] + ".."


def _write_csv(found: TokenLedger) -> None:
    rows = found.rows()
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]) if rows else ["position", "token"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _load_decoder(folder: Path) -> Callable[[int], str] | None:
    """Load the tokenizer of a run to show the texts of tokens; None, with a note, if it cannot be."""
    from strop.config.source import yaml_text

    try:
        values = yaml_text.parse_value((folder / "config.yaml").read_text(encoding="utf-8"))
        name = (values["policy"].get("tokenizer") or {}).get("name") or values["policy"]["model_name"]
        from strop.models.loading import load_tokenizer

        tokenizer = load_tokenizer(name)
    except Exception as error:  # a tokenizer of a model that is elsewhere by now raises anything
        print(f"note: tokens are shown by their ids: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return lambda token: str(tokenizer.decode([token]))


LEDGER = Command(ledger, "say what each term of the loss was at each token of a rollout", group="look")
