"""MaxRL: the gradient of the log of the success rate."""

from __future__ import annotations

import pytest

from strop.algorithms.base import Plan
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.maxrl import MaxRL, SuccessRate
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from support.tokens import make_group_rewards


def test_negative_rewards_are_refused_where_they_come_from() -> None:
    with pytest.raises(ValueError, match="reward_scaling"):
        SuccessRate().rollout_advantages(make_group_rewards(1.0, -1.0))
    plan = Plan(group_size=4)
    assert any("SoftOverlong" in problem for problem in MaxRL(shaping=SoftOverlong()).validate(plan))
    assert any("KL term" in problem for problem in MaxRL(kl=Kl(place="reward")).validate(plan))
    assert list(MaxRL(kl=Kl(place="loss")).validate(plan)) == []
