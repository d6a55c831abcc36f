"""Train a model that reads images with GRPO: ``strop grpo`` with examples/configs/vlm_grpo_3B.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("grpo", Path(__file__).parent / "configs" / "vlm_grpo_3B.yaml"))
