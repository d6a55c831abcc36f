"""Build policy-gradient algorithms from flat options."""

from __future__ import annotations

from typing import Any

from strop.algorithm_factory import all_parts
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO, Clip, GroupRelative
from strop.algorithms.policy_gradient.sequence_objectives import SequenceClip

_ADVANTAGE = ("baseline", "leave_one_out", "normalize")
_OBJECTIVE = {"clip_low": "low", "clip_high": "high", "dual_clip": "dual"}
_KL = {"kl_penalty": "weight", "kl_estimator": "estimator", "kl_input_clamp": "input_clamp", "kl_output_clamp": "output_clamp"}


def grpo(**flat: Any) -> GRPO:
    """Build GRPO from the options of its parts: clip_low, kl_penalty, kl_in_reward, sequence_ratio, leave_one_out, ..."""
    advantage = {name: flat.pop(name) for name in _ADVANTAGE if name in flat}
    objective = {field: flat.pop(name) for name, field in _OBJECTIVE.items() if name in flat}
    kl = {field: flat.pop(name) for name, field in _KL.items() if name in flat}
    place = "reward" if flat.pop("kl_in_reward", False) else "loss"
    kind = SequenceClip if flat.pop("sequence_ratio", False) else Clip
    options = {"low": 0.2, "high": 0.2, **objective} if kind is SequenceClip else objective
    return GRPO(
        advantage=GroupRelative(**advantage),
        objective=kind(**options),
        kl=Kl(**{"weight": 0.0, **kl}, place=place) if kl else None,
        **flat,
    )


def find_part(name: str, **options: Any) -> Any:
    """A part by its name; None where no package that is here declares it."""
    kind = all_parts().get(name)
    return None if kind is None else kind(**options)
