"""Train with ``strop dpo`` and examples/configs/dpo.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("dpo", Path(__file__).parent / "configs" / "dpo.yaml"))
