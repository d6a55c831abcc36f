"""Train on the sliding puzzle: ``strop grpo`` with examples/configs/grpo_sliding_puzzle.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("grpo", Path(__file__).parent / "configs" / "grpo_sliding_puzzle.yaml"))
