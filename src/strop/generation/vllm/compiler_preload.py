"""What the server of engines asks torch's compiler once, before it forks: the instructions of this machine, and the Triton it has.

vLLM compiles the look-up of divided embeddings and the choice of drafts, also in eager mode, and each worker would compile and start four
small programs and read all of Triton for it.
"""

from __future__ import annotations

from contextlib import suppress

import torch._inductor.compile_fx  # noqa: F401
from torch._inductor.codecache import CacheBase
from torch._inductor.cpu_vec_isa import pick_vec_isa

# Without a compiler, say: whoever compiles asks again, and says what is missing.
with suppress(Exception):
    pick_vec_isa()
with suppress(Exception):
    CacheBase.get_system()
