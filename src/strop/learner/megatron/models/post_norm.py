"""Linear layers followed by a norm: what attention and MLP of Gemma 2 and 3 add to the residual stream."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor


@cache
def with_post_norm(linear: Any, norm: Any) -> type:
    """Return ``linear``, a row-parallel layer of Megatron Core, with a ``StageNorm`` of its whole output: ``post_layernorm``."""

    class PostNormLinear(linear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = norm(config, output_size, config.layernorm_epsilon)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(hidden)
            return self.post_layernorm(output), bias

    return PostNormLinear
