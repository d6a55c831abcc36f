"""A text adventure that is generated from a seed: rooms, keys, locked doors, and a treasure to carry out of the house.

Doors lead between neighbouring rooms of a grid. The path to the treasure leads through locked doors, each of whose keys lies on the side
from which it is needed, so every adventure can be won; ``solve`` finds the shortest way and proves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from strop.environments.base import EnvironmentConfigError, reward
from strop.extensions.games.text_game import GameStep, TextGame
from strop.types import Rollout, Task

DIRECTIONS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
ROOMS = ("hall", "kitchen", "library", "cellar", "attic", "study", "garden", "pantry", "chapel", "workshop", "gallery", "stable")
COLOURS = ("red", "blue", "green", "yellow")
TREASURES = ("crown", "lantern", "map", "violin", "compass")
Place = tuple[int, int]


@dataclass(frozen=True)
class House:
    names: Mapping[Place, str]
    doors: frozenset[frozenset[Place]]
    locks: Mapping[frozenset[Place], str]  # door -> the colour of its key
    items: Mapping[str, Place]  # where each thing is at first
    treasure: str
    start: Place = (0, 0)


@dataclass(frozen=True, kw_only=True)
class AdventureTask(Task):
    house: House


@dataclass(frozen=True)
class AdventureState:
    place: Place
    carried: frozenset[str] = frozenset()
    unlocked: frozenset[frozenset[Place]] = frozenset()
    turns: int = 0


@dataclass(frozen=True, kw_only=True)
class TextAdventure(TextGame[AdventureTask, AdventureState]):
    """Bring the treasure to the room where you began. A turn is one command, on the last line that is not empty."""

    rooms: int = 6  # from 2 to 12
    locks: int = 1  # locked doors on the way, at most 4
    max_turns: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.rooms <= len(ROOMS) or not 0 <= self.locks <= min(len(COLOURS), self.rooms - 1):
            raise EnvironmentConfigError(
                f"rooms is {self.rooms} and locks is {self.locks}; set rooms to 2 to {len(ROOMS)}, and locks to at most {len(COLOURS)} "
                "and fewer than rooms"
            )
        if self.max_turns < 1:
            raise EnvironmentConfigError(f"max_turns is {self.max_turns}; set it to at least 1")

    def make_task(self, random: Random) -> AdventureTask:
        """Draw houses until one can be won within the allowed turns."""
        for _ in range(100):
            house = build_house(random, self.rooms, self.locks)
            way = solve(house)
            if len(way) <= self.max_turns:
                state = AdventureState(house.start)
                question = (
                    f"You are in a house. Bring the {house.treasure} to the {house.names[house.start]}. Commands: go north, go south, go "
                    "east, go west, take THING, unlock DIRECTION (with the key of its colour), look, inventory. Answer with one command."
                    f"\n\n{describe(house, state)}"
                )
                return AdventureTask(id=f"text_adventure:{_name(house)}", question=question, answer=", ".join(way), house=house)
        raise EnvironmentConfigError(
            f"no house of {self.rooms} rooms and {self.locks} locks is won within max_turns={self.max_turns}; raise max_turns"
        )

    def first_state(self, task: AdventureTask) -> AdventureState:
        return AdventureState(task.house.start)

    def describe_state(self, state: AdventureState) -> str:
        """Return what is where; not the number of turns."""
        doors = sorted(sorted(door) for door in state.unlocked)
        return f"{state.place} {sorted(state.carried)} {doors}"

    def step(self, task: AdventureTask, state: AdventureState, text: str) -> GameStep[AdventureState]:
        lines = [line.strip().strip(".>`*").lower() for line in text.splitlines() if line.strip()]
        after, said = obey(task.house, state, lines[-1] if lines else "")
        after = replace(after, turns=state.turns + 1)
        new = len(after.carried - state.carried) + len(after.unlocked - state.unlocked)
        won = task.house.treasure in after.carried and after.place == task.house.start
        return GameStep(after, said, points=float(new), over=won or after.turns >= self.max_turns, won=won)

    def reference_turns(self, task: AdventureTask) -> Sequence[str]:
        return task.answer.split(", ")

    @reward(weight=0.0, per_turn=True)
    def points(self, task: AdventureTask, rollout: Rollout) -> list[float]:
        """One for each thing taken and each door unlocked, in the turn that did it. Give it a weight to reward the way, too."""
        return [step.points for step in self.play(task, rollout)]


def build_house(random: Random, rooms: int, locks: int) -> House:
    """Grow a tree of rooms, lock doors on the way to the treasure, and put each key on the near side of its door."""
    places: list[Place] = [(0, 0)]
    parents: dict[Place, Place] = {}
    while len(places) < rooms:
        beside = random.choice(places)
        across, down = random.choice(list(DIRECTIONS.values()))
        place = (beside[0] + across, beside[1] + down)
        if place not in places:
            places.append(place)
            parents[place] = beside
    treasure_room = max(places, key=lambda place: (len(_way_up(parents, place)), place))
    way = _way_up(parents, treasure_room)[::-1]  # rooms after the start, in order
    locked = {
        frozenset((room, parents[room])): colour
        for room, colour in zip(random.sample(way, min(locks, len(way))), COLOURS, strict=False)
    }
    order = sorted(locked, key=lambda door: min(way.index(room) for room in door if room in way))
    items: dict[str, Place] = {}
    for number, door in enumerate(order):
        near = reachable(places, parents, set(order[number:]))  # without this door and those after it
        items[f"{locked[door]} key"] = random.choice(near)
    treasure = random.choice(TREASURES)
    items[treasure] = treasure_room
    names = dict(zip(places, random.sample(ROOMS, rooms), strict=True))
    doors = frozenset(frozenset((room, parent)) for room, parent in parents.items())
    return House(names, doors, locked, items, treasure)


def _way_up(parents: Mapping[Place, Place], place: Place) -> list[Place]:
    way = []
    while place in parents:
        way.append(place)
        place = parents[place]
    return way


def reachable(places: Sequence[Place], parents: Mapping[Place, Place], closed: set[frozenset[Place]]) -> list[Place]:
    """Return the rooms that can be reached from the start without the closed doors."""
    open_rooms = [places[0]]
    for place in places[1:]:  # parents come first
        if parents[place] in open_rooms and frozenset((place, parents[place])) not in closed:
            open_rooms.append(place)
    return open_rooms


def obey(house: House, state: AdventureState, command: str) -> tuple[AdventureState, str]:
    """Return the state after a command, the same one if it is not possible, and what is said."""
    verb, _, thing = command.partition(" ")
    thing = thing.strip().removeprefix("the ")
    here = state.place
    if verb in ("go", "unlock") and thing in DIRECTIONS:
        across, down = DIRECTIONS[thing]
        there = (here[0] + across, here[1] + down)
        door = frozenset((here, there))
        if door not in house.doors:
            return state, f"There is no door to the {thing}."
        colour = house.locks.get(door)
        closed = colour is not None and door not in state.unlocked
        if verb == "unlock":
            return _unlock(state, door, thing, colour if closed else None)
        if closed:
            return state, f"The {colour} door to the {thing} is locked."
        moved = replace(state, place=there)
        return moved, describe(house, moved)
    if verb == "take" and thing in house.items:
        if thing in state.carried or house.items[thing] != here:
            return state, f"There is no {thing} here."
        return replace(state, carried=state.carried | {thing}), f"You take the {thing}."
    if command == "look":
        return state, describe(house, state)
    if command == "inventory":
        return state, f"You carry: {', '.join(sorted(state.carried)) or 'nothing'}."
    return state, "That is not a command you can follow here."


def _unlock(state: AdventureState, door: frozenset[Place], direction: str, colour: str | None) -> tuple[AdventureState, str]:
    if colour is None:
        return state, f"The door to the {direction} is not locked."
    if f"{colour} key" not in state.carried:
        return state, f"You have no {colour} key."
    return replace(state, unlocked=state.unlocked | {door}), f"You unlock the {colour} door to the {direction}."


def describe(house: House, state: AdventureState) -> str:
    here = state.place
    doors = []
    for direction, (across, down) in DIRECTIONS.items():
        door = frozenset((here, (here[0] + across, here[1] + down)))
        if door in house.doors:
            closed = door in house.locks and door not in state.unlocked
            doors.append(f"{direction} ({house.locks[door]}, locked)" if closed else direction)
    things = sorted(item for item, place in house.items.items() if place == here and item not in state.carried)
    seen = f" You see: {', '.join(things)}." if things else ""
    return f"You are in the {house.names[here]}. Doors: {', '.join(doors)}.{seen}"


def solve(house: House) -> list[str]:
    """Return a shortest list of commands that wins. Raises ValueError if there is none."""
    first = AdventureState(house.start)
    ways: dict[AdventureState, list[str]] = {first: []}
    queue = deque([first])
    commands = [f"{verb} {direction}" for verb in ("go", "unlock") for direction in DIRECTIONS]
    commands += [f"take {item}" for item in house.items]
    while queue:
        state = queue.popleft()
        if house.treasure in state.carried and state.place == house.start:
            return ways[state]
        for command in commands:
            after, _ = obey(house, state, command)
            if after not in ways:
                ways[after] = [*ways[state], command]
                queue.append(after)
    raise ValueError(f"the house {_name(house)} cannot be won")


def _name(house: House) -> str:
    rooms = " ".join(f"{name}@{x},{y}" for (x, y), name in sorted(house.names.items()))
    locks = " ".join(sorted(f"{colour}:{sorted(door)}" for door, colour in house.locks.items()))
    items = " ".join(f"{item}@{x},{y}" for item, (x, y) in sorted(house.items.items()))
    return f"{rooms} | {locks} | {items}".replace("), (", "-")
