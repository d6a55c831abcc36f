"""A dry run of a model whose config.json is here asks what a run asks once its weights are loaded. No folder here has weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from support.every_family import make_config
from support.models import CONFIGS
from support.overrides import RUN
from support.tokenizer import build_tokenizer

RANKS = ["cluster.gpus_per_node=4"]
SHORT = "policy.max_total_sequence_length=128"  # as many positions as are learned, or fewer
D = "policy.dtensor_cfg"


def write_config(folder: Path, family: str, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    config = CONFIGS[family]() if family in CONFIGS else make_config(family)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **changes}))


def refuse(capsys: pytest.CaptureFixture[str], *words: str, section: str = "grpo") -> str:
    """Return what the dry run says, which is what the run says before it loads anything."""
    said = []
    for flags in ([], ["--dry-run"]):
        assert cli.main([section, *words, *flags]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "Traceback" not in said[0]
    return said[0]


CASES: list[tuple[str, dict[str, Any], list[str], str]] = [
    # family, changes of its configuration, overrides, what is said
    ("gpt2", {}, [*RANKS, SHORT, f"{D}.tensor_parallel_size=2"],
     f"{D}.tensor_parallel_size: GPT2LMHeadModel has no tensor-parallel plan"),
    ("gpt2", {}, [*RANKS, SHORT, f"{D}.pipeline_parallel_size=2"],
     f"{D}.pipeline_parallel_size: GPT2Model of GPT2LMHeadModel is not an"),
    ("llama", {}, [*RANKS, f"{D}.tensor_parallel_size=4"], "does not divide the 2 key-value heads of LlamaForCausalLM"),
    ("llama", {"intermediate_size": 49}, [*RANKS, f"{D}.tensor_parallel_size=2"],
     "does not divide the 49 outputs of model.layers.0"),
    ("llama", {}, [*RANKS, f"{D}.expert_parallel_size=2"], "expert_parallel_size is 2 and LlamaForCausalLM has no expert layers"),
    ("qwen3_5", {"linear_num_value_heads": 6, "num_key_value_heads": 4}, [*RANKS, f"{D}.tensor_parallel_size=4"],
     f"{D}.tensor_parallel_size: tensor_parallel_size 4 does not divide the 6 value heads of the recurrent layer"),
    ("recurrent_gemma", {}, [*RANKS, f"{D}.pipeline_parallel_size=2"],
     f"{D}.pipeline_parallel_size: RecurrentGemmaForCausalLM cannot be cut into pipeline stages (its forward pass changes hidden"),
    ("qwen3_moe", {"num_local_experts": 6}, [*RANKS, f"{D}.expert_parallel_size=4"], "4 does not divide the 6 experts"),
    ("llama", {}, [*RANKS, f"{D}.pipeline_parallel_size=4"], "pipeline_parallel_size: found 4, which needs 4 stages"),
    ("llama", {}, [*RANKS, f"{D}.tensor_parallel_size=2", f"{D}.custom_parallel_plan=no_such:PLAN"],
     "no_such of 'no_such:PLAN' cannot be imported"),
    ("llama", {}, [f"{D}.lora_cfg.enabled=true", f"{D}.lora_cfg.target_modules=[q_prj]"],
     "'q_prj' matches nothing; did you mean 'q_proj'?"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, [],
     "policy.model_name: the weights of model are quantised (awq)"),
    ("llama", {}, ["policy.hf_config_overrides.rope=1"], "policy.hf_config_overrides.rope: LlamaConfig has no such field"),
    ("llama", {"model_type": "lama"}, [*RANKS, f"{D}.tensor_parallel_size=2"],
     "policy.model_name: The checkpoint you are trying"),
    ("llama", {"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}, [*RANKS, f"{D}.tensor_parallel_size=2"],
     "trust_remote_code"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "words", "said"), CASES)
def test_a_model_that_a_run_refuses_once_it_is_loaded_is_refused_before(
    family: str,
    changes: dict[str, Any],
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", family, **changes)
    assert said in refuse(capsys, *RUN, "policy.model_name=model", "policy.device=cpu", *words)


@pytest.mark.slow
def test_what_fits_passes_and_a_model_of_the_cache_is_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write_config(tmp_path / "model", "qwen3_moe")
    sizes = [*RANKS, f"{D}.tensor_parallel_size=2", f"{D}.pipeline_parallel_size=2"]
    lora = [f"{D}.lora_cfg.enabled=true", f"{D}.lora_cfg.target_modules=[q_proj]"]
    for words in (sizes, lora):
        assert cli.main(["grpo", *RUN, "policy.model_name=model", "policy.device=cpu", *words, "--dry-run"]) == 0, words
    cached = tmp_path / "models--owner--name" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    write_config(cached, "llama")
    capsys.readouterr()
    said = refuse(capsys, *RUN, "policy.model_name=owner/name", "policy.device=cpu", *RANKS, f"{D}.tensor_parallel_size=4")
    assert "the 2 key-value heads" in said


@pytest.mark.extensions
@pytest.mark.slow
def test_a_reward_model_of_a_family_without_classifiers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", "recurrent_gemma")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}) + "\n")
    words = ["data.train.dataset_name=pairs.jsonl", "rm.val_period=0", "checkpointing.metric_name=null", "policy.device=cpu"]
    said = refuse(capsys, "policy.model_name=model", *words, section="rm")
    assert "policy.model_name: model is a recurrent_gemma model, for which Transformers has no sequence classifier" in said


# --- chat templates and turns ------------------------------------------------------------------------------------------------

TOOLS = ["env={sums: {tools: ['tool.py:add'], rewards: {correct: 'tool.py:correct'}}}", "data.train.env_name=sums"]
TALK = ["env={talk: {type: 'tool.py:Talk'}}", "data.train.env_name=talk"]
ROWS = ["data.train.dataset_name=rows.jsonl", "data.train.input_key=question", "data.train.output_key=answer"]
FORGETFUL = "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}\n{% endfor %}"


@pytest.fixture
def speaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run whose model's folder has its configuration and tokenizer."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", "llama")
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    (tmp_path / "tool.py").write_text(
        "from strop.environments.base import DatasetEnvironment, reward\n"
        'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: one\n        b: other\n    """\n    return a + b\n'
        "def correct(task, rollout):\n    return 1.0\n"
        "class Talk(DatasetEnvironment):\n"
        "    def respond(self, task, rollout):\n        return []\n"
        "    @reward()\n    def good(self, task, rollout):\n        return 1.0\n"
    )
    return [*RUN, "policy.model_name=model", "policy.device=cpu", *ROWS]


@pytest.mark.slow
def test_a_chat_template_without_tools_is_refused_where_the_environment_has_some(
    speaking: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [*speaking, *TOOLS, "grpo.max_rollout_turns=3"]
    assert cli.main(["grpo", *turns, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "the environment has tools, but the chat template writes no tool calls; set policy.tokenizer.tool_call_format" in said
    assert cli.main(["grpo", *turns, "policy.tokenizer.tool_call_format=hermes", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().err
    # the run says it before it looks for weights, of which there are none
    assert cli.main(["grpo", *turns]) == 1
    assert "the chat template writes no tool calls" in capsys.readouterr().err


@pytest.mark.slow
def test_a_chat_template_that_loses_replies_is_refused_where_there_are_turns(
    speaking: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    turns = [*speaking, *TALK, "grpo.max_rollout_turns=3"]
    assert cli.main(["grpo", *turns, "--dry-run"]) == 0
    assert cli.main(["grpo", *turns, "policy.tokenizer.chat_template=forgetful.jinja", "--dry-run"]) == 2
    assert "so a conversation cannot be continued as tokens" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "why"), [(TOOLS, "has tools"), (TALK, "answers the policy (respond)")])
def test_one_turn_of_an_environment_with_several_is_warned_of(
    words: list[str], why: str, speaking: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    known = [*speaking, "policy.tokenizer.tool_call_format=hermes", *words]
    assert cli.main(["grpo", *known, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"{why}, but grpo.max_rollout_turns is 1, so every episode ends after the policy's first turn" in said
    assert cli.main(["grpo", *known, "grpo.max_rollout_turns=2", "--dry-run"]) == 0
    assert "max_rollout_turns" not in capsys.readouterr().err
