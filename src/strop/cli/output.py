"""Common parts of the commands: exit codes, the parser for commands with a configuration, messages, and ``--dry-run``."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from strop.config import ConfigError, EvalRunConfig, LoadedConfig, TrainingRunConfig
    from strop.runs.dry_run.examine import Examination


OWN_FILES = ("metrics.jsonl", "status.json", "starts.jsonl")  # of a log folder, whose configuration may name where it was before


def find_log_folder(run: Path) -> Path:
    """Return the log folder of a run, given the folder itself, a configuration, or a folder of checkpoints, which have its configuration.

    Raises ValueError if the configuration is not YAML.
    """
    from strop.config.source import yaml_text

    if any((run / name).exists() for name in OWN_FILES):
        return run
    checkpoints = sorted(run.glob("step_*/config.yaml"), key=lambda path: path.stat().st_mtime) if run.is_dir() else []
    for file in (run, run / "config.yaml", *checkpoints[-1:]):
        if file.suffix in (".yaml", ".yml") and file.is_file():
            try:
                values, _ = yaml_text.parse(file.read_text(encoding="utf-8"))
            except yaml_text.YamlError as error:
                raise ValueError(f"{file} is not valid YAML: {error}") from error
            logger = values.get("logger") if isinstance(values, dict) else None
            log_dir = logger.get("log_dir") if isinstance(logger, dict) else None
            if isinstance(log_dir, str):
                return Path(log_dir)
    return run


OVERRIDES_HELP = "key=value settings that override the file, such as grpo.num_prompts_per_step=8; ~key removes a key"
USAGE_ERROR, INTERRUPTED = 2, 130


class RunParser(argparse.ArgumentParser):
    """A parser that suggests the intended option for an unknown one, or the key=value form of settings."""

    def parse_intermixed_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Take a configuration in its place as ``--config FILE`` too, as the commands that train do."""
        words = list(sys.argv[1:] if args is None else args)
        places = [action.dest for action in self._get_positional_actions()]
        if "config" in places:
            words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
            if "--config" in words[:-1]:
                given = words.index("--config")
                file = words[given + 1]
                del words[given : given + 2]
                words.insert(places.index("config"), file)
        return super().parse_intermixed_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        _, found, rest = message.partition("unrecognized arguments: ")
        if found:
            option = rest.split()[0].partition("=")[0]
            close = difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.7)
            message += (
                f"; did you mean {close[0]}?" if close else "; settings are written key=value, such as grpo.max_num_steps=20"
            )
        super().error(message)


def make_run_parser(command: str, description: str, default_config: Path | None) -> argparse.ArgumentParser:
    parser = RunParser(prog=f"strop {command}", description=description, allow_abbrev=False)
    default = "the default of every key" if default_config is None else str(default_config)
    parser.add_argument(
        "--config", type=Path, default=default_config, metavar="FILE", help=f"a YAML configuration (default: {default})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the configuration and what it names, print a summary of the run, and exit"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="with --dry-run, also print the resolved configuration: every key"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    return parser


def removed_option(instead: str) -> Callable[[str], NoReturn]:
    """Return the type of a removed option: it rejects any value and names the replacement."""

    def refuse(given: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"this option is gone: {instead}")

    return refuse


def add_assumptions(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe GPUs that this machine lacks."""
    parser.add_argument(
        "--assume-gpus", type=_positive, metavar="N", help="with --dry-run, show what the run would do on nodes of N GPUs"
    )
    parser.add_argument("--assume-nodes", type=_positive, metavar="N", help="with --assume-gpus, on N such nodes (default: 1)")


def _positive(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return int(text)


@dataclass(frozen=True)
class AssumedCluster:
    """The GPUs that a dry run describes, instead of this machine's."""

    gpus: int
    nodes: int

    @property
    def overrides(self) -> list[str]:
        return [f"cluster.gpus_per_node={self.gpus}", f"cluster.num_nodes={self.nodes}"]


def read_assumptions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> AssumedCluster | None:
    """Return the GPUs described by --assume-gpus and --assume-nodes; None without them. Exits for an invalid combination."""
    if options.assume_gpus is None and options.assume_nodes is None:
        return None
    if not options.dry_run:
        parser.error("--assume-gpus and --assume-nodes describe a run without starting it; add --dry-run")
    if options.assume_gpus is None:
        parser.error("--assume-nodes needs --assume-gpus: how many GPUs each node has")
    return AssumedCluster(options.assume_gpus, options.assume_nodes or 1)


def note_assumptions(assumed: AssumedCluster, config: TrainingRunConfig) -> Iterator[str]:
    """Yield where the assumptions differ from the configuration."""
    cluster = config.cluster
    for option, value, key, configured, default in (
        ("--assume-gpus", assumed.gpus, "cluster.gpus_per_node", cluster.gpus_per_node, 1),
        ("--assume-nodes", assumed.nodes, "cluster.num_nodes", cluster.num_nodes, 1),
    ):
        if configured not in (value, default):
            yield f"{option} {value} takes the place of {key}={configured} in this dry run only; a run has {configured}"
        elif configured != value:
            yield f"a run on these machines needs {key}={value}, which this dry run assumes"
    if config.policy.device == "cpu":
        yield "policy.device is cpu, so the run would not use the assumed GPUs; set policy.device=auto"


def print_dry_run(
    config: TrainingRunConfig | EvalRunConfig, examination: Examination, *, verbose: bool, assumed: AssumedCluster | None = None
) -> int:
    from strop import packages
    from strop.config import EvalRunConfig, dump_config
    from strop.runs.summary import summarize

    if verbose:
        print(dump_config(config))
    try:
        on_cpu = None if assumed is None or isinstance(config, EvalRunConfig) else config.policy.device == "cpu"
        print(summarize(config, examination.algorithm, on_cpu=on_cpu, verbose=verbose))
        if assumed is not None and not isinstance(config, EvalRunConfig) and not on_cpu:
            from strop.runs.dry_run.assumed_cluster import describe_assumed

            print(*describe_assumed(config), sep="\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    for note in (*examination.notes, *packages.describe_assumed()):
        print(f"note        {note}")
    return 0


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of Python and of Strop's loggers as lines on stderr, until a run takes over."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger, previous = logging.getLogger("strop"), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        print(f"warning: {message}", file=sys.stderr)

    logger.addHandler(handler)
    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        logger.removeHandler(handler)
        warnings.showwarning = previous


def print_warnings(loaded: LoadedConfig[Any]) -> None:
    for problem in loaded.warnings:
        print(f"warning: {problem}", file=sys.stderr)


def print_config_error(error: ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR


def print_interrupted(hint: str) -> int:
    print(f"\nInterrupted. {hint}", file=sys.stderr)
    return INTERRUPTED


def add_choice_of_weights(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint of a run."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N of a run (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best value of checkpointing.metric_name")
    parser.add_argument("--ema", action="store_true", help="the averaged weights (policy.ema.enabled)")
