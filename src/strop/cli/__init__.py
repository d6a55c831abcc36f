"""The command line."""

from strop.cli.commands import main, run_script

__all__ = ["main", "run_script"]
