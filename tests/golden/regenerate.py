"""Write the golden curve anew: ``python tests/golden/regenerate.py``.

Do it when the numbers are meant to change, look at what is printed, and say in the commit why they did.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    from golden.curve import FILE, curve

    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        found = curve(Path(folder))
    for name, values in found.items():
        known = before.get(name, [])
        changed = sum(old != new for old, new in zip(known, values, strict=False))
        print(f"{name:40} {values[0]:10.6g} -> {values[-1]:10.6g}   {changed} of {len(known)} values changed")
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
