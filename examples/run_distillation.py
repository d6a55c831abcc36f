"""Train with ``strop distillation`` and examples/configs/distillation_math.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("distillation", Path(__file__).parent / "configs" / "distillation_math.yaml"))
