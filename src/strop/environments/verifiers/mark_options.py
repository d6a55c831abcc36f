"""How a reward counts, from its configuration keys: weight, schedule, gates, accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from strop.environments.base import EnvironmentConfigError
from strop.environments.rewards import Gate, RewardFunction, RewardMark, WeightSchedule, is_finite, sort_by_gates
from strop.user_code import suggest_names

MARK_OPTIONS = ("weight", "accuracy", "group", "per_turn", "gate")
GATE_OPTIONS = tuple(each.name for each in fields(Gate))
SCHEDULES = ("linear", "cosine", "steps")
A_SCHEDULE = "a schedule is such as {schedule: linear, points: {0: 1.0, 200: 0.1}}: weights by step, in ascending order"


def read_mark(options: Mapping[str, Any], mark: RewardMark, source: str) -> tuple[RewardMark, bool | None]:
    """Return how a reward counts (``mark`` unless overridden by options), and whether it is the accuracy (None: not specified)."""
    weight, group = options.get("weight", mark.weight), options.get("group", mark.group)
    accuracy, per_turn = options.get("accuracy", mark.accuracy or None), options.get("per_turn", mark.per_turn)
    schedule = mark.schedule
    if isinstance(weight, Mapping):
        schedule = _read_schedule(weight, source)
        weight = schedule.points[-1][1]
    if isinstance(weight, bool) or not is_finite(weight):
        raise EnvironmentConfigError(f"the weight of the reward {source} is {weight!r}; set it to a finite number")
    for option, value in (("accuracy", accuracy), ("group", group), ("per_turn", per_turn), ("thread", options.get("thread"))):
        if value is not None and not isinstance(value, bool):
            raise EnvironmentConfigError(f"the option {option} of the reward {source} is {value!r}; set it to true or false")
    if group and per_turn:
        raise EnvironmentConfigError(f"the reward {source} is of a group and per_turn; set one of them to false")
    gates = _read_gates(options.get("gate"), source, per_turn=bool(per_turn))
    made = RewardMark(
        weight=float(weight),
        group=bool(group),
        per_turn=bool(per_turn),
        schedule=schedule,
        gates=gates,
        log_weighted=mark.log_weighted or schedule is not None or bool(gates),
        concurrent=mark.concurrent,
    )
    return made, accuracy


def _read_schedule(given: Mapping[str, Any], source: str) -> WeightSchedule:
    for option in given:
        if option not in ("schedule", "points"):
            raise EnvironmentConfigError(
                f"the weight of the reward {source} has no option {option!r}{suggest_names(str(option), ('schedule', 'points'))}"
            )
    kind, points = given.get("schedule"), given.get("points")
    if kind not in SCHEDULES:
        raise EnvironmentConfigError(
            f"the reward {source} has no schedule {kind!r}{suggest_names(str(kind), SCHEDULES)}; {A_SCHEDULE}"
        )
    if not isinstance(points, Mapping) or not points:
        raise EnvironmentConfigError(f"the points of the schedule of the reward {source} are {points!r:.80}; {A_SCHEDULE}")
    read: list[tuple[int, float]] = []
    for step, weight in points.items():
        number = int(step) if isinstance(step, int) or (isinstance(step, str) and step.isdecimal()) else -1
        if isinstance(step, bool) or number < 0 or isinstance(weight, bool) or not is_finite(weight):
            raise EnvironmentConfigError(
                f"the schedule of the reward {source} has the point {step!r}: {weight!r:.80}; {A_SCHEDULE}"
            )
        read.append((number, float(weight)))
    if [step for step, _ in read] != sorted({step for step, _ in read}):
        raise EnvironmentConfigError(f"the steps of the schedule of the reward {source} are {list(points)}; {A_SCHEDULE}")
    return WeightSchedule(kind, tuple(read))


def _read_gates(given: Any, source: str, *, per_turn: bool) -> tuple[Gate, ...]:
    """Read one gate or a list of them, each the name of a reward or a mapping."""
    entries = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(_read_gate(each, source, per_turn=per_turn) for each in entries)


def _read_gate(given: Any, source: str, *, per_turn: bool) -> Gate:
    options = given if isinstance(given, Mapping) else {"reward": given}
    for option in options:
        if option not in GATE_OPTIONS:
            raise EnvironmentConfigError(f"a gate has no option {option!r}{suggest_names(str(option), GATE_OPTIONS)}")
    if not isinstance(options.get("reward"), str):
        raise EnvironmentConfigError(
            f"the gate of the reward {source} is {given!r:.80}; set it to the name of another reward, or to {{reward: NAME, at_least: 1.0}}"
        )
    gate = Gate(**options)
    if not is_finite(gate.at_least) or not (gate.otherwise is None or is_finite(gate.otherwise)):
        raise EnvironmentConfigError(f"the gate of the reward {source} is {gate}; at_least and otherwise are finite numbers")
    if not isinstance(gate.multiply, bool):
        raise EnvironmentConfigError(f"multiply of the gate of the reward {source} is {gate.multiply!r}; set it to true or false")
    if per_turn and gate.otherwise:
        raise EnvironmentConfigError(
            f"the reward {source} is per_turn, and no turn has a reward while its gate is closed; set otherwise to 0 or null"
        )
    return replace(gate, at_least=float(gate.at_least))


def order_by_gates(functions: Mapping[str, RewardFunction]) -> list[str]:
    """Return the names of rewards, each after the rewards of its gates. Raises EnvironmentConfigError for invalid gates."""
    for name, each in functions.items():
        for gate in each.mark.gates:
            if gate.reward not in functions:
                raise EnvironmentConfigError(
                    f"the gate of the reward {name} names {gate.reward!r}, which is not a reward{suggest_names(gate.reward, functions)}"
                )
            if functions[gate.reward].mark.group and not each.mark.group:
                raise EnvironmentConfigError(
                    f"the gate of the reward {name} names {gate.reward}, which compares all rollouts of a task and is computed after "
                    f"{name}; gate {name} by another reward"
                )
    try:
        return sort_by_gates({name: each.mark.gates for name, each in functions.items()})
    except ValueError as error:
        raise EnvironmentConfigError(str(error)) from error
