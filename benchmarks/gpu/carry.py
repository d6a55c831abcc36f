"""Fetch the wheels that a GPU machine without a network lacks, for ``run.py --wheels FOLDER``, and say how large they are.

python benchmarks/gpu/carry.py wheels
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from job import ROOT
from run import find_commit

CARRIED = (  # what Strop imports beyond machine.txt, and what that imports; the last two are for policy.fp8 and the tests of Megatron
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "omegaconf", "antlr4-python3-runtime", "ruamel.yaml"),
    *("datasets", "dill", "multiprocess", "math-verify", "latex2sympy2_extended", "torchao", "megatron-core"),
)
PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)), "manylinux2014_x86_64")


def pinned(names: tuple[str, ...] = CARRIED) -> list[str]:
    """Return the requirements at the versions that Strop is tested with."""
    pins = (ROOT / "constraints" / "cpu.txt").read_text()
    found = [re.search(rf"^{re.escape(name)}==\S+", pins, re.MULTILINE) for name in names]
    missing = [name for name, match in zip(names, found, strict=True) if match is None]
    if missing:
        raise ValueError(f"constraints/cpu.txt has no version of {', '.join(missing)}")
    return [match[0] for match in found if match is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    options = [
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "-d",
        str(folder),
    ]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, "--implementation", "cp", *platforms, *pinned()])
    if done.returncode:
        return done.returncode
    (folder / "commit.txt").write_text(find_commit(None) + "\n")  # a copy of the checkout may come without its history
    sizes = {wheel.name: wheel.stat().st_size for wheel in folder.glob("*.whl")}
    print(f"{len(sizes)} wheels, {sum(sizes.values()) / 1e6:.1f} MB, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
