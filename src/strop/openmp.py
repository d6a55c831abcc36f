"""How long threads of OpenMP wait awake, in the processes that Strop starts.

Torch's operators and the compiled kernels meet at a barrier after every parallel loop. By default threads of libgomp spin there for
300,000 rounds before they sleep. If another process takes the core of one of them (another terminal, container, service or job of
a CI), the others spin until the kernel switches, at every barrier: a step takes thirty to fifty times as long. A short spin
costs up to a tenth of a step on cores that are not shared.

libgomp reads the variables once, when it is loaded: before that they have to be in the environment.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"  # rounds
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # a user who sets either has chosen


def openmp_variables() -> dict[str, str]:
    """Return the variables for a process of Strop: what the environment of this process says, or a short spin."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} or {VARIABLES[0]: SPIN_COUNT}
