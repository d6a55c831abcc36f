"""Whether the interpreter of SGLang's engines has SGLang."""

from __future__ import annotations

import subprocess
import sys

from strop.packages import assume, is_here


def require_sglang(python: str) -> None:
    """Raises ValueError unless an interpreter has SGLang, or is assumed to have it."""
    if python == sys.executable:
        found, why = is_here("sglang"), "No module named 'sglang'"
    else:
        look = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
        try:
            found, why = subprocess.run([python, "-c", look], capture_output=True).returncode == 0, "No module named 'sglang'"
        except OSError as error:
            found, why = False, str(error)
    if not found and not assume("sglang"):
        raise ValueError(
            f"policy.generation.backend is sglang, and {python} has no SGLang ({why}): `make setup-sglang` makes one that has it; "
            "set policy.generation.sglang_cfg.python, or STROP_SGLANG_PYTHON, to its interpreter, or "
            "policy.generation.backend=torch"
        )
