"""``strop eval`` with a model that answers by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeGenerator
from strop import cli
from strop.generation.base import Completion
from strop.sampling import Sampling


@dataclass
class ScriptedModel(FakeGenerator):
    """Answers each prompt, as text, by ``answer``."""

    answer: Callable[[str], str] = lambda prompt: ""

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        text = self.answer(self.tokenizer.decode(prompt))
        return replace(await super().generate(prompt, sampling=sampling, seed=seed), text=text, stopped=True)


def evaluate_script(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    dataset: str,
    answer: Callable[[str], str],
    *overrides: str,
) -> dict[str, Any]:
    """Return the metrics of ``strop eval MODEL data.dataset_name=DATASET`` where the model answers by a script."""

    async def make_engine(policy: Any, *others: Any, **more: Any) -> ScriptedModel:
        return ScriptedModel(policy.template.tokenizer, answer=answer)

    monkeypatch.setattr("strop.build.evaluate.make_serving_engine", make_engine)
    settings = ("generation.vllm_cfg.max_model_len=100000", f"data.dataset_name={dataset}", *overrides)
    capsys.readouterr()
    code = cli.main(["eval", "--json", str(model), *settings])
    output = capsys.readouterr()
    assert code == 0, output.err
    report: dict[str, Any] = json.loads(output.out)
    return report
