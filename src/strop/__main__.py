"""``python -m strop`` is ``strop``."""

import sys

from strop.cli import main

sys.exit(main())
