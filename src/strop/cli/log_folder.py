"""The log folder of the run named on a command line."""

from __future__ import annotations

from pathlib import Path

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
