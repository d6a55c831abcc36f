"""Evaluate: ``strop eval`` with examples/configs/evals/eval.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("eval", Path(__file__).parent / "configs" / "evals" / "eval.yaml"))
