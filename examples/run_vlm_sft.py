"""Train a model that reads images: ``strop sft`` with examples/configs/sft_vlm_3B.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("sft", Path(__file__).parent / "configs" / "sft_vlm_3B.yaml"))
