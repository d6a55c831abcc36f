"""IcePop (Ling team, "Small leak can sink a great ship", 2025): masked importance sampling of tokens with a wide band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.policy_gradient.corrections.masked import Mis


@dataclass(frozen=True, kw_only=True)
class Icepop(Mis):
    """w per token if low <= w <= high, else 0, with the authors' bounds. Logs ``icepop_weight`` and ``icepop_cut``."""

    name: ClassVar[str] = "icepop"
    low: float = 0.5
    high: float = 5.0
