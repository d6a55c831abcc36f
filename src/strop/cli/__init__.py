"""The command line; one file for each command."""

from strop.cli.commands import main, run_script

__all__ = ["main", "run_script"]
