"""The command line: ``strop grpo`` and the other kinds of training, ``strop eval``, ``strop plot``, ``strop doctor``, ``strop cluster
check``, ``strop config``.

Options and ``a.b=c`` overrides may stand in any order. Nothing heavy is imported before it is needed, so that ``--help`` and a
mistake in a configuration answer at once. Exit codes: 0 done, 1 it failed, 2 a mistake in what was asked for, 130 interrupted, 143
ended because it was told to (SIGTERM, or its time is up), to be continued.
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
from strop.stopping import ENDED_EARLY, EndedEarly

if TYPE_CHECKING:
    from strop.config import ConfigError, EvalRunConfig, Loaded, TrainingRunConfig

OVERRIDES_HELP = "key=value settings on top of the file, such as grpo.num_prompts_per_step=8; ~key takes one away"
MISTAKE, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The ``strop`` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _top_parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    return COMMANDS[options.command](options.arguments, f"strop {shlex.join(arguments)}")


def run_script(command: str, default_config: Path) -> int:
    """A script of examples/: ``strop COMMAND`` with a configuration of its own when none is named."""
    arguments = sys.argv[1:]
    typed = f"python {shlex.join([sys.argv[0], *arguments])}"
    if command == "eval":
        return evaluate(arguments, typed, default_config)
    return train_run(command, arguments, typed, default_config)


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop",
        description="Strop post-trains language models.",
        epilog="`strop COMMAND --help` says what a command takes.\n\n"
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
        + "; eval (evaluate), plot (draw a run's curves), doctor (how a run stands), "
        "cluster check (whether machines are fit for a run), config (list the keys)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser


def _run_parser(command: str, description: str, default_config: Path | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"strop {command}", description=description, allow_abbrev=False)
    default = "the schema's defaults" if default_config is None else str(default_config)
    parser.add_argument(
        "--config", type=Path, default=default_config, metavar="FILE", help=f"a YAML configuration (default: {default})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, print the resolved configuration and what would run where, and stop"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    return parser


def train_run(section: str, arguments: Sequence[str], typed: str, default_config: Path | None = None) -> int:
    """Train."""
    from strop.config import TRAINING_RUNS, ConfigError, load_config

    options = _run_parser(section, f"Train a language model: {TRAINING[section]}.", default_config).parse_intermixed_args(
        arguments
    )
    loaded: Loaded[TrainingRunConfig] | None = None
    try:
        loaded = load_config(options.config, options.overrides, root=TRAINING_RUNS[section])
        _warn(loaded)
        if options.dry_run:
            return _dry_run(loaded.config)
        from strop import assembly

        return assembly.run_training(loaded.config)
    except ConfigError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        if loaded is None:
            return _interrupted("Nothing had begun.")
        return _interrupted(_how_to_continue(loaded.config, typed))
    except EndedEarly as ended:
        assert loaded is not None
        print(f"\n{ended} {_how_to_continue(loaded.config, typed)}", file=sys.stderr)
        return ENDED_EARLY


def _how_to_continue(config: TrainingRunConfig, typed: str) -> str:
    saving = config.checkpointing
    if not (saving.saves and saving.resume):
        return "Checkpoints or checkpointing.resume are off, so the same command starts from the beginning."
    there_is = any(Path(saving.checkpoint_dir).glob("step_*"))
    where = (
        f"from the newest checkpoint in {saving.checkpoint_dir}"
        if there_is
        else f"from the beginning (no checkpoint in {saving.checkpoint_dir} yet)"
    )
    return f"Start the same command again to continue {where}:\n    {typed}"


def evaluate(arguments: Sequence[str], typed: str, default_config: Path | None = None) -> int:
    """Evaluate a model."""
    from strop.config import ConfigError, EvalRunConfig, load_config

    options = _run_parser("eval", "Evaluate a language model.", default_config).parse_intermixed_args(arguments)
    try:
        loaded = load_config(options.config, options.overrides, root=EvalRunConfig)
        _warn(loaded)
        if options.dry_run:
            return _dry_run(loaded.config)
        from strop import assembly

        return assembly.run_evaluation(loaded.config)
    except ConfigError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return _interrupted(f"An evaluation starts from the beginning:\n    {typed}")


def plot(arguments: Sequence[str], typed: str) -> int:
    """Draw a run's curves."""
    parser = argparse.ArgumentParser(prog="strop plot", description="Draw the curves of a run to a PNG.", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's log folder, the one with metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the picture to write (default: in the log folder)")
    options = parser.parse_args(arguments)
    if not options.run.exists():
        print(f"error: there is no folder {options.run}; name a run's log folder, the one with metrics.jsonl", file=sys.stderr)
        return MISTAKE
    from strop.tracking.plot import plot_run

    try:
        print(plot_run(options.run, options.output))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    return 0


def doctor(arguments: Sequence[str], typed: str) -> int:
    """Say how a run stands; 0 if it is well, 1 if not, 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="strop doctor",
        description="Say whether a run lives, who waits for whom and for how long, what went wrong, and what to do.",
        epilog="Exit codes: 0 running or finished, 1 in trouble, 2 there is no such run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's log folder, or a configuration (its logger.log_dir)")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    options = parser.parse_args(arguments)
    from strop.watch.doctor import NoRun, diagnose, plain, show

    try:
        found = diagnose(_log_folder(options.run))
    except (NoRun, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    if options.json:
        import dataclasses
        import json

        print(json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        show(found)
    else:
        print(plain(found))
    return 0 if found.healthy else 1


def cluster(arguments: Sequence[str], typed: str) -> int:
    """Say whether a cluster is fit for a run; 0 if it is, 1 if not, 2 after a mistake in the configuration."""
    parser = argparse.ArgumentParser(
        prog="strop cluster",
        description="check: join the Ray cluster that a run would join, or start one here as it would, and look at every node: versions, "
        "GPUs, memory, shared folders, models, clocks, how fast the nodes reach each other, and whether the layout fits.",
        epilog="Exit codes: 0 a run can start, 1 there are problems, 2 a mistake in the configuration.\n\n"
        "  strop cluster check cluster.num_nodes=2 cluster.gpus_per_node=8\n"
        "  strop cluster check --config examples/configs/grpo_math_1B.yaml cluster.num_nodes=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("check",), metavar="check", help="the only thing there is to do")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the run's YAML configuration (default: none, only key=value about the machines)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    options = parser.parse_intermixed_args(arguments)
    from strop.config import ConfigError
    from strop.config.kinds import load_any

    try:
        loaded = load_any(options.config, options.overrides)
        _warn(loaded)
    except ConfigError as error:
        return _refuse(error)
    try:
        from strop.assembly.cluster_check import check_cluster

        return check_cluster(loaded.config)
    except KeyboardInterrupt:
        return _interrupted("Nothing was left behind.")


def _log_folder(run: Path) -> Path:
    """The log folder of a run that is named by it, by its configuration, or by a checkpoint, which holds one."""
    from strop.config import yaml_text

    for file in (run, run / "config.yaml"):
        if file.suffix in (".yaml", ".yml") and file.is_file() and not (run / "metrics.jsonl").exists():
            try:
                values, _ = yaml_text.parse(file.read_text(encoding="utf-8"))
            except yaml_text.YamlError as error:
                raise ValueError(f"{file} is no YAML: {error}") from error
            logger = values.get("logger") if isinstance(values, dict) else None
            named = logger.get("log_dir") if isinstance(logger, dict) else None
            if isinstance(named, str):
                return Path(named)
    return run


def config(arguments: Sequence[str], typed: str) -> int:
    """List the keys."""
    parser = argparse.ArgumentParser(
        prog="strop config", description="List every key with type, default and meaning.", allow_abbrev=False
    )
    parser.add_argument("schema", choices=(*TRAINING, "eval"), nargs="?", default="grpo", help="whose keys (default: grpo)")
    options = parser.parse_args(arguments)
    from strop.config.document import annotated_yaml
    from strop.config.schema import TRAINING_RUNS, EvalRunConfig

    print(annotated_yaml(TRAINING_RUNS.get(options.schema, EvalRunConfig)), end="")
    return 0


TRAINING = {  # kinds of training run, each a section of its configuration
    "grpo": "GRPO and the other policy gradients",
    "ppo": "policy gradients with a critic",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation: DPO and its family",
    "rm": "a reward model",
    "distillation": "learning from a teacher",
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
    from strop import assembly

    try:
        print(assembly.describe(config))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    return 0


def _warn(loaded: Loaded[Any]) -> None:
    for problem in loaded.warnings:
        print(f"warning: {problem}", file=sys.stderr)


def _refuse(error: ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return MISTAKE


def _interrupted(hint: str) -> int:
    print(f"\nInterrupted. {hint}", file=sys.stderr)
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
