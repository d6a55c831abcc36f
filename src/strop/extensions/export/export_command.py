"""``strop export``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, add_choice_of_weights, print_interrupted

DTYPES = ("bfloat16", "float16", "float32")


def export(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop export``. Return its exit code."""
    options = make_export_parser().parse_args(arguments)

    from strop.checkpointing.saved_model import SavedModelNotFound, find_saved_model

    try:
        source = find_saved_model(
            options.checkpoint, step=options.step, best=options.best, ema=options.ema, critic=options.critic
        )
        from strop.extensions.export.export_model import ExportJob, run_export
        from strop.extensions.export.model_folder import ExportFormat

        form = ExportFormat(options.dtype, options.max_shard_size)
        return run_export(
            ExportJob(
                source=source, target=options.out, form=form, merge=options.merge, push=options.push, private=options.private
            )
        )
    except SavedModelNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return print_interrupted(f"Nothing was written. An export starts from the beginning:\n    {command_line}")


def make_export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop export",
        description="Write a checkpoint as a folder that Transformers, vLLM and PEFT load, with its tokenizer and a model card.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_N folder, a run (its newest checkpoint), or any model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must be new or empty")
    add_choice_of_weights(parser)
    parser.add_argument("--critic", action="store_true", help="the critic of `strop ppo` instead of the policy")
    parser.add_argument(
        "--merge", action="store_true", help="merge LoRA adapters into their base; without it adapters stay adapters"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="data type of the weights (default: as they are)")
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="largest file of weights, such as 5GB")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the folder to the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="create the repository of --push as a private one")
    return parser


def _size(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write a number and a unit, such as 5GB or 500MB")
    return text.replace(" ", "").upper().replace("IB", "iB")


EXPORT = Command(export, "write a checkpoint as a Hugging Face folder", group="use")
