"""The examples of docs/verifiers.md, as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import yaml

from strop.environments.compute_rewards import compute_rewards
from strop.environments.registry import make_environment
from strop.environments.verifier_registry import list_verifiers
from strop.extensions.judges.llm_endpoint import ENDPOINT_OPTIONS
from strop.types import Task

PAGE = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text()
YAML, OWN = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
TASK = Task(id="t", question="1+1?", answer="2")


def test_the_rewards_of_the_first_example_are_made_and_a_closed_gate_asks_nobody(talk):
    environment = make_environment("reward_function", YAML["env"]["mine"])
    scored = asyncio.run(compute_rewards(environment, TASK, talk(TASK, "<answer>2</answer>", version=100)))
    assert scored.rewards == {"right": 1.0, "format": 0.0, "short": 1.0} and scored.reward == 1.15


def test_the_example_of_a_verifier_of_ones_own_scores(talk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n# palindrome.py\n(.*?)```", PAGE, re.DOTALL)
    Path("palindrome.py").write_text(code)
    environment = make_environment("reward_function", OWN["env"]["words"])
    scored = asyncio.run(compute_rewards(environment, TASK, talk(TASK, "<answer>Anna</answer>")))
    assert scored.rewards == {"mirror": 0.5} and scored.metrics["mirror/letters"] == 4


def test_the_page_names_every_verifier_and_every_key_of_an_endpoint():
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(list_verifiers()) | set(ENDPOINT_OPTIONS) <= named
