"""The guides of docs/guides, run from top to bottom as they are written, with the tiny model under the names of their models."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Running, heed_interrupts, start, strop
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.config import TRAINING_RUNS, EvalRunConfig
from strop.config.source.keys import find_field, iter_keys
from support.sweep import sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GUIDES = {page.stem: page for page in sorted((ROOT / "docs" / "guides").glob("*.md"))}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODEL = re.compile(r"\b(?:Qwen|HuggingFaceTB)/[\w.-]*\w")
TINY = ["policy.precision=float32", "policy.device=cpu", "policy.max_total_sequence_length=480"]
SHORT = {
    "grpo.max_num_steps": 2,
    "grpo.num_prompts_per_step": 2,
    "grpo.num_generations_per_prompt": 2,
    "grpo.max_val_samples": 2,
    "policy.generation.max_new_tokens": 4,
    "policy.generation.torch_cfg.kv_cache_memory_gb": 0.01,
}
APPENDED = {  # to the commands of a guide, so that they take a second
    **dict.fromkeys(("sft", "dpo", "rm"), TINY),
    "grpo": [*TINY, *(f"{key}={value}" for key, value in SHORT.items())],
    "eval": ["generation.max_new_tokens=4", "generation.vllm_cfg.max_model_len=480"],
}


@pytest.fixture
def home(tiny: Path, tmp_path: Path, local_hub: Path) -> Path:
    """A folder with the tiny model under every name that the guides use, rows in the columns that are the default, and the hub's sets."""
    for name in {found for page in GUIDES.values() for found in MODEL.findall(page.read_text())}:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tiny)
    rows = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_files_of_others(home: Path) -> None:
    """The files that the guide for users of other libraries translates."""
    model = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\noutput_dir: out\ndataset_name: train.jsonl\n"
    (home / "grpo.yaml").write_text(
        f"{model}reward_funcs: [accuracy_reward]\nnum_generations: 8\nper_device_train_batch_size: 8\n"
    )
    (home / "args.json").write_text(json.dumps({"model_name_or_path": "m", "dataset_name": "owner/name", "output_dir": "out"}))
    (home / "run_qwen2-7b.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet "
        "data.train_batch_size=64 actor_rollout_ref.model.path=m actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8\n"
    )
    (home / "examples").mkdir()
    shutil.copy(home / "run_qwen2-7b.sh", home / "examples")
    shutil.copytree(ROOT / "examples" / "prompts", home / "examples" / "prompts")
    shutil.copy(ROOT / "examples" / "configs" / "grpo_math_1B.yaml", home / "recipe.yaml")


@pytest.mark.parametrize("name", sweep(sorted(GUIDES.keys() - {"cluster_run"})))  # its commands need containers, a hub and Slurm
def test_a_guide_runs_as_it_is_written(name: str, home: Path) -> None:
    servers: list[Running] = []
    if name == "coming_from":
        write_files_of_others(home)
    try:
        for number, (language, text) in enumerate(BLOCK.findall(GUIDES[name].read_text())):
            if language == "python":
                run_python(text, home, number)
            if language == "sh":
                for line in text.replace("\\\n", " ").splitlines():
                    run_line(line, home, servers)
    finally:
        for server in servers:
            server.process.terminate()
            server.process.join()


def run_python(text: str, home: Path, number: int) -> None:
    if named := re.match(r"# (\w+\.py)\n", text):
        (home / named[1]).write_text(text)
        return
    assert 'grpo={"max_num_steps": 20}' in text
    (home / f"block_{number}.py").write_text(text.replace('grpo={"max_num_steps": 20}', f"**{SHORT | {'policy.device': 'cpu'}}"))
    done = start([f"block_{number}.py"], home).finish()
    assert done.code == 0, done.err


def run_line(line: str, home: Path, servers: list[Running]) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "curl":
        answer = subprocess.run(line, shell=True, cwd=home, capture_output=True, text=True, timeout=60)
        assert '"choices"' in answer.stdout, answer
        return
    assert words[0] == "strop", f"the guide has a command that no test runs: {line}"
    appended = APPENDED.get(words[1], [])
    if words[1] == "eval" and "--config" not in words:
        appended = ["generation.max_new_tokens=4"]
    if words[-1] == "&":
        servers.append(start(words[1:-1], home, before=heed_interrupts))
        wait_for_port(int(words[words.index("--port") + 1]), servers[-1])
        return
    outcome = strop(*words[1 : words.index(">") if ">" in words else None], *appended, folder=home)
    assert outcome.code == 0, f"{line}\n{outcome.out}\n{outcome.err}"


def wait_for_port(port: int, server: Running) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.process.exitcode is None, (server.folder / ".err").read_text()
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


# --- coming from another trainer --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    title: str  # of the first column
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


def rows() -> Iterator[Row]:
    """Every row of a table of docs/guides/coming_from.md whose second column is Strop's."""
    title = ""
    for line in GUIDES["coming_from"].read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or line.startswith("|---") or len(cells) < 2:
            title = title if line.startswith("|") else ""
        elif cells[1].rstrip(" |") == "Strop":
            title = cells[0].strip("`")
        elif title:
            yield Row(title, *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[:2]))


ROWS = list(rows())
TABLES = ("TrainingArguments", "GRPOConfig", "SFTConfig", "DPOConfig", "RewardConfig")


def test_the_tables_of_other_trainers_are_read() -> None:
    assert {row.title for row in ROWS} == {*TABLES, "verl"} and len(ROWS) > 80
    assert all(row.theirs and row.ours for row in ROWS)


@pytest.mark.parametrize("title", TABLES)
def test_every_name_of_trl_is_an_argument_there(title: str) -> None:
    trl = pytest.importorskip("trl")
    arguments = {field.name for field in dataclasses.fields(getattr(trl, title.replace("TrainingArguments", "GRPOConfig")))}
    unknown = {name for row in ROWS if row.title == title for name in row.theirs} - arguments
    assert not unknown, f"TRL's {title} has no {unknown}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(row.theirs))
def test_every_key_beside_another_trainers_is_one_of_strop(row: Row) -> None:
    for key in row.ours:
        models: list[Any] = [*TRAINING_RUNS.values(), EvalRunConfig]
        assert any(is_key(model, key) for model in models), f"{key} is no key"


def is_key(model: Any, key: str) -> bool:
    if key.startswith("algorithm.") and key.count(".") == 1:  # a field of an algorithm
        return key.partition(".")[2] in {"name", *(field.name for field in dataclasses.fields(PolicyGradient))}
    repeated = {found.dotted for found in iter_keys(model, repeated=True)}  # with those of mappings, such as an optimizer's lr
    return key in repeated or find_field(model, key.split(".")) is not None
