"""``strop eval``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands import Command
from strop.cli.output import (
    USAGE_ERROR,
    add_choice_of_weights,
    make_run_parser,
    plain_warnings,
    print_config_error,
    print_dry_run,
    print_interrupted,
    print_warnings,
)

if TYPE_CHECKING:
    from strop.checkpointing.saved_model import SavedModel
    from strop.config import TrainingRunConfig
    from strop.runs.dry_run.examined_data import DataExamination

DESCRIPTION = (
    "Evaluate a run, a checkpoint or a model. RUN_OR_CHECKPOINT is a log folder, a folder of checkpoints, a step_N folder, a Hugging Face "
    "folder or a hub name; environment, data and sampling of a run are those of its validation. Overrides are keys of the run or of an "
    "evaluation."
)


def evaluate(arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run ``strop eval``. Return its exit code."""
    from strop.checkpointing.saved_model import SavedModelNotFound
    from strop.config import ConfigError

    parser = make_eval_parser(default_config)
    options = parser.parse_intermixed_args(arguments)
    names = [text for text in options.overrides if is_model_name(text)]
    options.overrides = [text for text in options.overrides if not is_model_name(text)]
    if len(names) > 1:
        parser.error(f"found {len(names)} models, {' and '.join(names)}; evaluate one at a time")
    try:
        model = _find_model(names[0] if names else None, options)
        if model is not None and model.config_file is not None and not _gives_environment(model, options.overrides):
            return _evaluate_run(model, options)
        return _evaluate_model(model, options)
    except SavedModelNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        return print_interrupted(
            "The same command continues with the tasks that are not finished; with eval.save_path=null it starts from the beginning:\n"
            f"    {command_line}"
        )


def make_eval_parser(default_config: Path | None) -> argparse.ArgumentParser:
    parser = make_run_parser("eval", DESCRIPTION, default_config)
    parser.usage = (
        "strop eval [RUN_OR_CHECKPOINT] [--config FILE] [--step N | --best] [--ema] [--json] [--dry-run] [key=value ...]"
    )
    add_choice_of_weights(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and everything else to stderr")
    return parser


def is_model_name(text: str) -> bool:
    """Whether an argument names a model: it is no override (key=value, ~key) and no configuration file."""
    return "=" not in text and not text.startswith(("~", "+")) and not text.endswith((".yaml", ".yml"))


def _find_model(name: str | None, options: argparse.Namespace) -> SavedModel | None:
    from strop.checkpointing.saved_model import SavedModelNotFound, find_saved_model

    if name is not None:
        return find_saved_model(name, step=options.step, best=options.best, ema=options.ema)
    if options.step is not None or options.best or options.ema:
        raise SavedModelNotFound(
            "--step, --best and --ema choose among the checkpoints of a run; name one: strop eval RUN --best"
        )
    return None


def _gives_environment(model: SavedModel, overrides: Sequence[str]) -> bool:
    """Whether an environment is given for a run on recorded data, which lacks one, so that its model is to be sampled."""
    given = any(text.lstrip("+").startswith(("env.", "env=", "data.env_name=")) for text in overrides)
    return given and bool({"sft", "dpo", "rm"} & set(model.run_values))


def _evaluate_run(model: SavedModel, options: argparse.Namespace) -> int:
    from strop.config import dump_config
    from strop.extensions.evaluation.evaluated_run import load_evaluated_run

    assert model.config_file is not None
    run = load_evaluated_run(model.config_file, options.overrides, root=model.run_root, file=options.config)
    _print_notes(run.notes)
    from strop.extensions.evaluation.evaluate import CheckpointEvaluation, run_evaluation, summarize_evaluation

    evaluation = CheckpointEvaluation(model, run)
    if options.dry_run:
        try:
            summary = summarize_evaluation(evaluation)
            examination = _examine_tasks(run.config)
            if options.verbose:
                print(dump_config(run.config))
            print("\n".join([summary, *examination.notes]))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE_ERROR
        return 0
    return run_evaluation(evaluation, as_json=options.json)


def _examine_tasks(config: TrainingRunConfig) -> DataExamination:
    """Examine the evaluation data of a checkpoint. Raises ConfigError."""
    from strop.config import ConfigError
    from strop.runs.dry_run.examined_data import examine_data

    found = examine_data(config, [("data.validation", entry) for entry in config.data.validation_entries])
    if found.problems:
        raise ConfigError(found.problems)
    return found


def _evaluate_model(model: SavedModel | None, options: argparse.Namespace) -> int:
    from strop.config import EvalRunConfig, load_config
    from strop.extensions.evaluation.evaluated_run import translate_overrides

    translated = translate_overrides(options.overrides, section=None)
    values: dict[str, Any] = {}
    if model is not None:
        values = {"generation": {"model_name": model.weights}, "tokenizer": {"name": model.weights, **_chat_template(model)}}
    loaded = load_config(options.config, translated.overrides, root=EvalRunConfig, values=values)
    _print_notes(translated.notes)
    print_warnings(loaded)
    from strop.runs.dry_run.examine import examine_loaded

    with plain_warnings():
        examination = examine_loaded(loaded, data=options.dry_run)
    if options.dry_run:
        return print_dry_run(loaded.config, examination, verbose=options.verbose)
    from strop.extensions.evaluation.evaluate import run_evaluation

    return run_evaluation(loaded.config, as_json=options.json)


def _chat_template(model: SavedModel) -> dict[str, Any]:
    """Return the tokenizer keys set by a model's run."""
    tokenizer = model.run_values.get("policy", {}).get("tokenizer") or {}
    return {name: tokenizer[name] for name in ("chat_template", "chat_template_kwargs") if tokenizer.get(name) is not None}


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


EVAL = Command(evaluate, "evaluate a run, a checkpoint or a model", group="use")
