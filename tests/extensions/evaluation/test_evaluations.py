"""Whole evaluations: killed and continued, with engines in processes of their own, and the commands that users know."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.runs import Outcome, overrides, start
from loop.tiny import build_tiny
from strop.cli import run_script

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "generation.vllm_cfg.max_model_len": 64,
    "generation.precision": "float32",
    "generation.device": "cpu",
    "generation.num_threads": 1,
    "generation.temperature": 1.0,
    "generation.max_new_tokens": 4,
    "generation.torch_cfg.kv_cache_memory_gb": 0.01,
    "eval.num_tests_per_prompt": 4,
    "eval.k_value": 2,
    "eval.save_path": "evaluation",
    "data.env_name": "arithmetic",
    "data.size": 8,
    "data.max_input_seq_length": 60,
    "env.arithmetic.max_operand": 3,
    "env.arithmetic.wording": "{expression}=",
}

BROKEN = """
from strop import reward
from strop.environments.arithmetic import Arithmetic

class Broken(Arithmetic):
    @reward(accuracy=True)
    def correct(self, task, rollout):
        raise OSError("the judge is not there")
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


def evaluate(model: Path, folder: Path, *, before: Any = None, timeout: float = 200, **changes: Any) -> Outcome:
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {"generation.model_name": str(model), **SETTINGS, **changed}
    return start(["eval", "--json", *overrides(settings)], folder, before=before).finish(timeout)


def read(folder: Path) -> Any:
    return json.loads((folder / "evaluation" / "step_000000.json").read_text())


@pytest.mark.exhaustive
def test_an_evaluation_that_is_killed_continues_to_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    one_by_one = {"generation__num_prompts_per_step": 1}
    assert evaluate(tiny, tmp_path / "whole", **one_by_one).code == 0
    killed = evaluate(tiny, tmp_path / "parts", before=Kill("while generating", 10), **one_by_one)
    assert killed.code == -9
    kept = (tmp_path / "parts/evaluation/tasks.jsonl").read_text().splitlines()
    assert 1 < len(kept) < 9
    continued = evaluate(tiny, tmp_path / "parts", **one_by_one)
    assert continued.code == 0 and f"{len(kept) - 1} task" in continued.err
    files = [(tmp_path / folder / "evaluation/step_000000.json").read_bytes() for folder in ("whole", "parts")]
    assert files[0] == files[1]


@pytest.mark.exhaustive
def test_two_torch_engines_over_ray_say_what_one_in_this_process_says(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    assert evaluate(tiny, tmp_path / "here").code == 0
    over_ray = evaluate(
        tiny, tmp_path / "ray", cluster__backend="ray", cluster__gpus_per_node=2, generation__torch_cfg__num_engines=2
    )
    assert over_ray.code == 0, over_ray.err
    assert "2 engines share the tasks" in over_ray.err
    assert read(tmp_path / "ray") == read(tmp_path / "here")


def test_an_evaluation_whose_samples_all_fail_is_an_error_that_says_why(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = {"generation.model_name": str(tiny), **SETTINGS, "env.broken.type": "broken.py:Broken", "data.env_name": "broken"}
    outcome = start(["eval", "--json", *overrides(settings)], tmp_path).finish(200)
    assert outcome.code == 1 and json.loads(outcome.out)["metrics"]["errors"] == 32
    assert (
        "warning: 32 of 32 samples failed, 32 by no fault of the policy, which the scores leave out; the first: " in outcome.err
    )
    assert "the judge is not there (broken.py, line 8, in Broken.correct)\n" in outcome.err
    assert outcome.err.rstrip().endswith("error: every sample failed, so these figures say nothing about the model")


# --- the commands of the guides, as they are written there -------------------------------------------------------------------------

LOCAL = "data.dataset_name=rows.jsonl data.input_key=Question data.output_key=Answer"
COMMANDS = {  # after ``python examples/run_eval.py``, in examples/..; what says what is evaluated
    "": "AIME2024 (math)",
    "generation.model_name={model}": "AIME2024 (math)",
    "generation.model_name=Qwen/Qwen3-8B generation.temperature=0.6 generation.top_p=0.95 generation.top_k=20 "
    "generation.vllm_cfg.max_model_len=38912 tokenizer.chat_template_kwargs.enable_thinking=true "
    "data.prompt_file=examples/prompts/cot.txt": "temperature 0.6, at most 38912 new tokens",
    "--config examples/configs/evals/gpqa_eval.yaml": "gpqa (math)",
    f"--config examples/configs/evals/local_eval.yaml {LOCAL}": "rows.jsonl, 2 rows (math)",
    "--config examples/configs/evals/math_eval.yaml generation.model_name=agentica-org/DeepScaleR-1.5B-Preview generation.temperature=0.6 "
    "generation.top_p=0.95 generation.vllm_cfg.max_model_len=32768 data.dataset_name=math500 eval.num_tests_per_prompt=16 "
    "cluster.gpus_per_node=8": "16 a task, temperature 0.6",
}  # fmt: skip


def prepare(folder: Path) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"Question": f"{n}+1", "Answer": str(n + 1)}) + "\n" for n in range(2)))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_guide_are_understood_as_they_are(
    command: str, tiny: Path, tmp_path: Path, local_hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["examples/run_eval.py", *command.format(model=tiny).split(), "--dry-run"])
    code = run_script("eval", Path("examples/configs/evals/eval.yaml"))
    said = capsys.readouterr()
    assert code == 0 and COMMANDS[command] in said.out, said.err
