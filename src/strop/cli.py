"""The command line: ``strop grpo`` and the other kinds of training, ``strop eval``, ``strop plot``, ``strop doctor``, ``strop cluster
check``, ``strop config``.

Options and ``a.b=c`` overrides may be given in any order. Heavy packages are imported only when needed, so that ``--help`` and errors in
a configuration are fast. Exit codes: 0 success, 1 failure, 2 error in the arguments or the configuration, 130 interrupted, 143 stopped by
SIGTERM or the time limit and can be continued.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import __version__
from strop.stopping import STOPPED_EXIT_CODE, RunStopped

if TYPE_CHECKING:
    from strop.config import ConfigError, EvalRunConfig, LoadedConfig, TrainingRunConfig

OVERRIDES_HELP = "key=value settings that override the file, such as grpo.num_prompts_per_step=8; ~key removes a key"
USAGE_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``strop`` command. Return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    return COMMANDS[options.command](options.arguments, f"strop {shlex.join(arguments)}")


def run_script(command: str, default_config: Path) -> int:
    """Run ``strop COMMAND`` for a script of examples/, with ``default_config`` if no ``--config`` is given."""
    arguments = sys.argv[1:]
    typed = f"python {shlex.join([sys.argv[0], *arguments])}"
    if command == "eval":
        return evaluate(arguments, typed, default_config)
    return train_run(command, arguments, typed, default_config)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop",
        description="Strop post-trains language models.",
        epilog="`strop COMMAND --help` shows the options of a command.\n\n"
        "  strop grpo --config examples/configs/quickstart.yaml\n"
        "  strop grpo --config examples/configs/grpo_math_1B.yaml --dry-run policy.model_name=Qwen/Qwen2.5-0.5B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"strop {__version__}")
    parser.add_argument(
        "command",
        choices=COMMANDS,
        metavar="COMMAND",
        help="train: "
        + ", ".join(f"{name} ({meaning})" for name, meaning in TRAINING.items())
        + "; eval (evaluate a model), plot (plot the metrics of a run), doctor (diagnose a run), "
        "cluster check (check nodes before a run), config (list all keys)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser


def _make_run_parser(command: str, description: str, default_config: Path | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"strop {command}", description=description, allow_abbrev=False)
    default = "the default of every key" if default_config is None else str(default_config)
    parser.add_argument(
        "--config", type=Path, default=default_config, metavar="FILE", help=f"a YAML configuration (default: {default})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, print the resolved configuration and a summary of the run, and exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    return parser


def train_run(section: str, arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run a training command. Return its exit code."""
    from strop.config import TRAINING_RUNS, ConfigError, load_config

    options = _make_run_parser(section, f"Train a language model: {TRAINING[section]}.", default_config).parse_intermixed_args(
        arguments
    )
    loaded: LoadedConfig[TrainingRunConfig] | None = None
    try:
        loaded = load_config(options.config, options.overrides, root=TRAINING_RUNS[section])
        _print_warnings(loaded)
        if options.dry_run:
            return _dry_run(loaded.config)
        from strop import build

        return build.run_training(loaded.config)
    except ConfigError as error:
        return _print_config_error(error)
    except KeyboardInterrupt:
        if loaded is None:
            return _print_interrupted("The run had not started.")
        return _print_interrupted(_format_resume_hint(loaded.config, command_line))
    except RunStopped as stopped:
        assert loaded is not None
        print(f"\n{stopped} {_format_resume_hint(loaded.config, command_line)}", file=sys.stderr)
        return STOPPED_EXIT_CODE


def _format_resume_hint(config: TrainingRunConfig, command_line: str) -> str:
    saving = config.checkpointing
    if not (saving.saving_enabled and saving.resume):
        return "Checkpoints or checkpointing.resume are disabled, so the same command starts from the beginning."
    has_checkpoint = any(Path(saving.checkpoint_dir).glob("step_*"))
    where = (
        f"from the newest checkpoint in {saving.checkpoint_dir}"
        if has_checkpoint
        else f"from the beginning (no checkpoint in {saving.checkpoint_dir} yet)"
    )
    return f"Start the same command again to continue {where}:\n    {command_line}"


def evaluate(arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run ``strop eval``. Return its exit code."""
    from strop.config import ConfigError, EvalRunConfig, load_config

    options = _make_run_parser("eval", "Evaluate a language model.", default_config).parse_intermixed_args(arguments)
    try:
        loaded = load_config(options.config, options.overrides, root=EvalRunConfig)
        _print_warnings(loaded)
        if options.dry_run:
            return _dry_run(loaded.config)
        from strop import build

        return build.run_evaluation(loaded.config)
    except ConfigError as error:
        return _print_config_error(error)
    except KeyboardInterrupt:
        return _print_interrupted(f"An evaluation starts from the beginning:\n    {command_line}")


def plot(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop plot``. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="strop plot", description="Plot the metrics of a run to a PNG file.", allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, which contains metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the PNG file to write (default: in the log folder)")
    options = parser.parse_args(arguments)
    if not options.run.exists():
        print(
            f"error: there is no folder {options.run}; give the log folder of a run, which contains metrics.jsonl",
            file=sys.stderr,
        )
        return USAGE_ERROR
    from strop.monitoring.plot import plot_run

    try:
        print(plot_run(options.run, options.output))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def doctor(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop doctor``. Return 0 if the run is healthy, 1 if not, 2 if there is no such run."""
    parser = argparse.ArgumentParser(
        prog="strop doctor",
        description="Diagnose a run: whether it is alive, what waits for what and for how long, what went wrong, and how to fix it.",
        epilog="Exit codes: 0 running or finished, 1 there are problems, 2 there is no such run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, or a configuration (its logger.log_dir)")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    options = parser.parse_args(arguments)
    from strop.monitoring.watchdog.doctor import RunNotFound, diagnose, format_diagnosis

    try:
        diagnosis = diagnose(_find_log_folder(options.run))
    except (RunNotFound, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        import dataclasses
        import json

        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, ensure_ascii=False))
    else:
        print(format_diagnosis(diagnosis))
    return 0 if diagnosis.healthy else 1


def cluster(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop cluster check``. Return 0 if a run can start, 1 if there are problems, 2 for an error in the configuration."""
    parser = argparse.ArgumentParser(
        prog="strop cluster",
        description="check: connect to the Ray cluster that a run would use, or start one here as it would, and check every node: "
        "versions, GPUs, shared folders, models, the speed of an all-reduce, and whether the layout fits.",
        epilog="Exit codes: 0 a run can start, 1 there are problems, 2 error in the configuration.\n\n"
        "  strop cluster check cluster.num_nodes=2 cluster.gpus_per_node=8\n"
        "  strop cluster check --config examples/configs/grpo_math_1B.yaml cluster.num_nodes=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("check",), metavar="check", help="the only action")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the YAML configuration of the run (default: none; key=value settings describe the cluster)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    options = parser.parse_intermixed_args(arguments)
    from strop.config import ConfigError
    from strop.config.load.load import load_any_kind

    try:
        loaded = load_any_kind(options.config, options.overrides)
        _print_warnings(loaded)
    except ConfigError as error:
        return _print_config_error(error)
    try:
        from strop.build.cluster.cluster_check import check_cluster

        return check_cluster(loaded.config)
    except KeyboardInterrupt:
        return _print_interrupted("All processes and files of the check were removed.")


def _find_log_folder(run: Path) -> Path:
    """Return the log folder of a run, given the folder itself, a configuration, or a checkpoint, which contains its configuration."""
    from strop.config.load import yaml_text

    for file in (run, run / "config.yaml"):
        if file.suffix in (".yaml", ".yml") and file.is_file() and not (run / "metrics.jsonl").exists():
            try:
                values, _ = yaml_text.parse(file.read_text(encoding="utf-8"))
            except yaml_text.YamlError as error:
                raise ValueError(f"{file} is not valid YAML: {error}") from error
            logger = values.get("logger") if isinstance(values, dict) else None
            log_dir = logger.get("log_dir") if isinstance(logger, dict) else None
            if isinstance(log_dir, str):
                return Path(log_dir)
    return run


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


TRAINING = {  # training commands; each is also a section of its configuration
    "grpo": "GRPO and other policy gradients",
    "ppo": "policy gradients with a critic",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation: DPO and its family",
    "rm": "a reward model",
    "distillation": "distillation from a teacher",
}
COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    **{section: partial(train_run, section) for section in TRAINING},
    "eval": evaluate,
    "plot": plot,
    "doctor": doctor,
    "cluster": cluster,
    "config": config,
}


def _dry_run(config: TrainingRunConfig | EvalRunConfig) -> int:
    from strop.config import dump_config

    print(dump_config(config))
    from strop import build

    try:
        print(build.summarize(config))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def _print_warnings(loaded: LoadedConfig[Any]) -> None:
    for problem in loaded.warnings:
        print(f"warning: {problem}", file=sys.stderr)


def _print_config_error(error: ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR


def _print_interrupted(hint: str) -> int:
    print(f"\nInterrupted. {hint}", file=sys.stderr)
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
