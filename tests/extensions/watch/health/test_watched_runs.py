"""Whole runs with which something is wrong, and what they say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.kinds import train
from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

ANSWERING = """
from dataclasses import dataclass
from strop.environments.arithmetic import Arithmetic
from strop.types import user

@dataclass(frozen=True, kw_only=True)
class Answering(Arithmetic):
    async def respond(self, task, rollout):
        return (user("go on"),)
"""


def test_an_environment_that_answers_says_that_it_may_not_from_the_start_to_the_end(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text(ANSWERING)
    changes = {"env.arithmetic.type": "answering.py:Answering", "logger.console": "plain", "grpo.max_num_steps": 2}
    outcome = grpo(tiny, tmp_path, **changes)
    assert outcome.code == 0, outcome.err
    warned = [line for line in outcome.out.splitlines() if "set grpo.max_rollout_turns=N" in line]
    first_step = next(line for line in outcome.out.splitlines() if "step 1/2" in line)
    assert len(warned) == 2 and outcome.out.index(warned[0]) < outcome.out.index(first_step)
    logged = metrics_of(tmp_path / "logs")
    assert [logged[step]["health/single_turn"] for step in (1, 2)] == [1, 1]


def test_a_learning_rate_that_spoils_the_weights_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    changes = {
        "policy.optimizer.name": "torch.optim.SGD",  # Adam's rate is refused above 1
        "policy.optimizer.kwargs.lr": 1000,
        "policy.optimizer.kwargs.weight_decay": 1000,
        "sft.max_num_steps": 30,
        "sft.max_skipped_steps_in_a_row": 4,
    }
    outcome = train("sft", tiny, tmp_path, **changes)
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert (
        "every optimizer step of the last 4 steps was skipped" in outcome.err and "sft.max_skipped_steps_in_a_row" in outcome.err
    )
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == [1, 2, 3, 4, 5] and logged[4]["health/skipped_steps"] == 1


@pytest.mark.exhaustive
def test_held_out_rows_that_are_never_used_are_mentioned(tiny: Path, tmp_path: Path) -> None:
    outcome = train("sft", tiny, tmp_path, **{"sft.val_period": 100, "sft.max_num_steps": 2, "logger.console": "plain"})
    assert outcome.code == 0, outcome.err
    said = outcome.out
    assert said.count("#never_validated") == 2 and "sft.val_at_end=true" in said
    assert said.rstrip().endswith("strop serve results/step_2")
    assert "... reading data: 0 of" in said and "strop rollouts" not in said and "generating" not in said
