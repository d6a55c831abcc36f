"""Whole runs with listeners that a user's file defines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from loop.runs import grpo, metrics_of
from strop.runs.monitors.run_listeners import RunSetup, attach_listeners
from strop.user_code import UserCodeError

pytestmark = pytest.mark.slow

LISTENERS = '''
from strop.trainer.listeners import RunListener

class Counter(RunListener):
    """Counts the tokens that a run trained on, over its restarts."""
    name = "counter"

    def __init__(self, setup):
        self.folder, self.tokens = setup.config.logger.log_dir, 0

    async def on_step(self, step):
        self.tokens += len(step.batch.target)
        self.warnings = [f"{self.tokens} tokens in {self.folder}"]
        return {"counter/tokens": float(self.tokens)}

    async def state_dict(self):
        return self.tokens

    def load_state_dict(self, state):
        self.tokens = state

def only_long_runs(setup):
    return None if setup.config.training.max_num_steps < 100 else Counter(setup)

class Nameless(RunListener):
    def __init__(self, setup): pass

class Mismatch(Counter):
    name = "mismatch"

class TakesNothing(RunListener):
    name = "nothing"
    def __init__(self): pass

def number(setup):
    return 3
'''


def test_a_listener_of_ones_own_sees_each_step_and_continues_where_the_run_does(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LISTENERS)
    named = ["mine.py:Counter", "mine.py:only_long_runs"]
    for steps in (2, 4):
        changes = {"logger.listeners": named, "logger.console": "plain", "grpo.max_num_steps": steps}
        outcome = grpo(tiny, tmp_path, **changes)
        assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
    trained = [logged[step]["train/tokens_trained"] for step in (1, 2, 3, 4)]
    assert [logged[step]["counter/tokens"] for step in (1, 2, 3, 4)] == [sum(trained[:step]) for step in (1, 2, 3, 4)]
    assert f"{int(sum(trained))} tokens in" in outcome.out.splitlines()[-1] + outcome.out[-2000:]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Cuonter", "did you mean 'Counter'?"),
        ("Nameless", "return a strop.trainer.listeners.RunListener with a name, or None"),
        ("number", "gives 3; return a strop.trainer.listeners.RunListener"),
        ("TakesNothing", "the listener mine.py:TakesNothing cannot be made from a RunSetup: TypeError"),
    ],
)
def test_what_is_no_listener_is_refused(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strop.plugins.declared", lambda group: {})
    Path("mine.py").write_text(LISTENERS)
    config = SimpleNamespace(logger=SimpleNamespace(listeners=[f"mine.py:{name}"]))
    with pytest.raises(UserCodeError, match=re.escape(said)):
        attach_listeners(RunSetup(config=config, algorithm=None, source=None, store=None))  # type: ignore[arg-type]


def test_a_second_listener_of_a_name_ends_the_run_before_its_first_step(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LISTENERS)
    outcome = grpo(tiny, tmp_path, **{"logger.listeners": ["mine.py:Mismatch"]})
    assert outcome.code == 1 and "several listeners are called mismatch" in outcome.err
    assert "Traceback" not in outcome.err.partition("It came through")[0]
    assert not (tmp_path / "logs" / "metrics.jsonl").exists()
