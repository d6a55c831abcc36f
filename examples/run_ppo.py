"""Train with ``strop ppo`` and examples/configs/ppo_math_1B.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("ppo", Path(__file__).parent / "configs" / "ppo_math_1B.yaml"))
