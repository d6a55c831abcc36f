"""``strop eval`` with a model that answers by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from strop import cli
from strop.generation.base import Completion
from strop.generation.torch.torch_engine import TorchEngine
from strop.sampling import Sampling


def evaluate_script(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    dataset: str,
    answer: Callable[[str], str],
    *overrides: str,
) -> dict[str, Any]:
    """Return the report of ``strop eval MODEL data.dataset_name=DATASET`` where the model answers each prompt by ``answer``."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def generate(self: Any, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        text = answer(tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False))
        tokens = torch.tensor([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        logprobs, versions = torch.zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.int32)
        return Completion(tokens=tokens, logprobs=logprobs, versions=versions, text=text, stopped=True)

    monkeypatch.setattr(TorchEngine, "generate", generate)
    settings = ("generation.vllm_cfg.max_model_len=4096", f"data.dataset_name={dataset}", *overrides)
    capsys.readouterr()
    code = cli.main(["eval", "--json", str(model), *settings])
    output = capsys.readouterr()
    assert code == 0, output.err
    report: dict[str, Any] = json.loads(output.out)
    return report
