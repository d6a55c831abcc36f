"""The last lines of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strop.monitoring.console import Closing

GRPO = Closing(
    log_dir=Path("logs/x"),
    samples=True,
    stores_rollouts=True,
    trains_scores=False,
    checkpoint=None,
    seconds=754,
    tokens=1234567,
)


@pytest.mark.parametrize(
    ("samples", "rollouts", "scores", "commands"),
    [
        (
            True,
            True,
            False,
            ["plot logs/x", "report logs/x", "rollouts logs/x --worst 3", "eval {0}", "export {0} OUT", "serve {0}"],
        ),
        (True, False, False, ["plot logs/x", "report logs/x", "eval {0}", "export {0} OUT", "serve {0}"]),
        (False, False, False, ["plot logs/x", "report logs/x", "export {0} OUT", "serve {0}"]),
        (False, False, True, ["plot logs/x", "report logs/x", "export {0} OUT"]),
    ],
)
def test_the_commands_to_go_on_with_are_those_that_work_for_the_kind_of_run(
    samples: bool, rollouts: bool, scores: bool, commands: list[str], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step_30"
    checkpoint.mkdir()
    closing = replace(GRPO, samples=samples, stores_rollouts=rollouts, trains_scores=scores, checkpoint=checkpoint)
    assert closing.commands() == [f"strop {command.format(checkpoint)}" for command in commands]
    assert replace(closing, checkpoint=None).commands() == [f"strop {command}" for command in commands if "{" not in command]


def test_the_last_lines_say_what_the_run_did_and_what_was_wrong(tmp_path: Path) -> None:
    (tmp_path / "step_30" / "weights").mkdir(parents=True)
    (tmp_path / "step_30" / "weights" / "model").write_bytes(bytes(1_600_000))
    closing = replace(
        GRPO,
        checkpoint=tmp_path / "step_30",
        warnings=["warning: all rewards are equal. Read some. Change the data (docs/troubleshooting.md#constant_rewards)"],
        failed_trackers=["WandbTracker failed"],
        hints=["wandb sync"],
    )
    assert str(closing).splitlines() == [
        "took        12:34, 1,234,567 tokens trained on",
        f"checkpoint  {tmp_path}/step_30 (1.6 MB)",
        "warning: all rewards are equal (docs/troubleshooting.md#constant_rewards)",
        "warning: WandbTracker failed",
        "wandb sync",
        "next:",
        "    strop plot logs/x",
        "    strop report logs/x",
        "    strop rollouts logs/x --worst 3",
        f"    strop eval {tmp_path}/step_30",
        f"    strop export {tmp_path}/step_30 OUT",
        f"    strop serve {tmp_path}/step_30",
    ]
