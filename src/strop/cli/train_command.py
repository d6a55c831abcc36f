"""``strop grpo`` and the other kinds of training, and ``strop config``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.output import (
    add_assumptions,
    make_run_parser,
    note_assumptions,
    plain_warnings,
    print_config_error,
    print_dry_run,
    print_interrupted,
    print_warnings,
    read_assumptions,
)
from strop.packages import assume_packages
from strop.stopping import STOPPED_EXIT_CODE, RunStopped

if TYPE_CHECKING:
    from strop.config import LoadedConfig, TrainingRunConfig


TRAINING = {  # training commands; each is also a section of its configuration
    "grpo": "GRPO and other policy gradients",
    "ppo": "policy gradients with a critic",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation: DPO and its family",
    "rm": "a reward model",
    "distillation": "distillation from a teacher",
}


def train_run(section: str, arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run a training command. Return its exit code."""
    from strop.config import TRAINING_RUNS, ConfigError, load_config

    parser = make_run_parser(section, f"Train a language model: {TRAINING[section]}.", default_config)
    add_assumptions(parser)
    options = parser.parse_intermixed_args(arguments)
    assumed = read_assumptions(parser, options)
    loaded: LoadedConfig[TrainingRunConfig] | None = None
    try:
        with nullcontext() if assumed is None else assume_packages():
            overrides = [*options.overrides, *(assumed.overrides if assumed else ())]
            has_gpus = None if assumed is None else True
            loaded = load_config(options.config, overrides, root=TRAINING_RUNS[section], has_gpus=has_gpus)
            print_warnings(loaded)
            from strop.runs.dry_run.examine import examine_loaded

            with plain_warnings():
                examination = examine_loaded(loaded, data=options.dry_run)
            if options.dry_run:
                if assumed is not None:
                    configured = load_config(options.config, options.overrides, root=TRAINING_RUNS[section], check=False)
                    for note in note_assumptions(assumed, configured.config):
                        print(f"warning: {note}", file=sys.stderr)
                return print_dry_run(loaded.config, examination, verbose=options.verbose, assumed=assumed)

        from strop.runs.train import run_training

        return run_training(loaded.config)
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        if loaded is None:
            return print_interrupted("The run had not started.")
        return print_interrupted(_format_resume_hint(loaded.config, command_line))
    except RunStopped as stopped:
        assert loaded is not None
        print(f"\n{stopped} {_format_resume_hint(loaded.config, command_line)}", file=sys.stderr)
        return STOPPED_EXIT_CODE


def _format_resume_hint(config: TrainingRunConfig, command_line: str) -> str:
    saving = config.checkpointing
    if not saving.saving_enabled or saving.resume == "never":
        return "No checkpoints are saved, or checkpointing.resume is never, so the same command starts from the beginning."
    has_checkpoint = any(Path(saving.checkpoint_dir).glob("step_*"))
    where = (
        f"from the newest checkpoint in {saving.checkpoint_dir}"
        if has_checkpoint
        else f"from the beginning (no checkpoint in {saving.checkpoint_dir} yet)"
    )
    return f"Start the same command again to continue {where}:\n    {command_line}"


def config(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop config``. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="strop config", description="List every key with its type, default and description.", allow_abbrev=False
    )
    parser.add_argument(
        "schema", choices=(*TRAINING, "eval"), nargs="?", default="grpo", help="command to list the keys of (default: grpo)"
    )
    options = parser.parse_args(arguments)
    from strop.config.load.reference import render_annotated_yaml
    from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig

    print(render_annotated_yaml(TRAINING_RUNS.get(options.schema, EvalRunConfig)), end="")
    return 0
