"""Train with ``strop rm`` and examples/configs/rm.yaml unless --config names another file."""

import sys
from pathlib import Path

from strop.cli import run_script

if __name__ == "__main__":
    sys.exit(run_script("rm", Path(__file__).parent / "configs" / "rm.yaml"))
