"""What is known to be wrong before a run starts."""

from __future__ import annotations

import pytest

from strop.environments.registry import list_marks
from strop.extensions.watch.health_monitor import check_epochs, check_reward_weights, check_validation
from strop.trainer.run import TrainOptions


@pytest.mark.parametrize(
    ("options", "weights", "said"),
    [
        ({}, {"a": 1.0, "b": 1.0}, None),
        ({"weight": 0.2}, {"a": 0.2, "b": 1.0}, None),  # the same is said twice
        ({"weight": 0.2}, {"a": 1.0, "b": 1.0}, "the weight 0.2 for a"),
        ({"weight": {"schedule": "linear", "points": {0: 0, 9: 1}}}, {"a": 1.0}, "a schedule for the weight of a"),
        ({"gate": "b"}, {"a": 1.0}, None),  # a closed gate gives 0, as anywhere
        ({"gate": {"reward": "b", "otherwise": None}}, {"a": 1.0}, "a gate that leaves a out where b is low"),
    ],
)
def test_weights_that_do_not_reach_an_algorithm_are_found(options: dict, weights: dict[str, float], said: str | None) -> None:
    rewards = {"a": {"verifier": "regex", "pattern": "a", **options}, "b": {"verifier": "regex", "pattern": "b"}}
    marks = list_marks("reward_function", {"rewards": rewards})
    found = list(check_reward_weights({"mine": marks}, weights, "algorithm.kwargs.advantage.weights"))
    assert [(finding.name, said in finding.message) for finding in found] == [("ignored_weights", True)] * (said is not None)


def test_weights_that_replace_those_of_a_class_do_not_reach_an_algorithm_either() -> None:
    marks = list_marks("math_multi_reward", {"reward_weights": {"integer": 0.3}})
    (found,) = check_reward_weights({"sums": marks}, {"integer": 1.0}, "algorithm.kwargs.advantage.weights")
    assert "env.sums has the weight 0.3 for integer, but" in found.message


def options(**changes: object) -> TrainOptions:
    return TrainOptions(**{"max_steps": 1_000_000, "groups_per_step": 4, "section": "sft", "val_period": 10, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "groups", "found"),
    [
        ({}, 4, True),  # one step, validated every ten: finding 15
        ({}, 40, False),
        ({}, None, False),
        ({"max_steps": 9}, None, True),
        ({"val_at_end": True}, 4, False),
        ({"val_at_start": True}, 4, False),
        ({"val_period": 0}, None, True),
        ({"val_start_at": 21}, 100, True),  # the first validation would be after step 30
        ({"val_start_at": 21}, 120, False),
    ],
)
def test_validation_data_that_is_never_used_is_found(changes: dict[str, object], groups: int | None, found: bool) -> None:
    findings = list(check_validation(options(**changes), groups, held_out=True))
    assert [finding.name for finding in findings] == ["never_validated"] * found
    assert all("sft.val_at_end=true" in finding.message for finding in findings)
    assert not list(check_validation(options(**changes), groups, held_out=False))


def test_epochs_that_end_a_run_before_its_steps_are_found_and_the_number_that_does_not() -> None:
    (found,) = check_epochs(options(max_steps=20), 16, 2)  # two epochs of 8 examples
    assert found.name == "epochs_end_first" and not found.logged
    assert "sft.max_num_epochs=2 ends this run after 4 of sft.max_num_steps=20 steps" in found.message
    assert "set sft.max_num_epochs=10 " in found.message
    for steps, groups, epochs in ((4, 16, 2), (1_000_000, 16, 2), (20, None, None)):
        assert not list(check_epochs(options(max_steps=steps), groups, epochs))
