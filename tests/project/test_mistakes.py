"""Typical mistakes, on the command line and in a file: one message names the place, the key, what was found and what to write, and no
model is loaded first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from support.sweep import one_in

RUN = """\
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  val_period: 0
policy:
  model_name: m
  device: cpu
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}
  tokenizer: {name: "${policy.model_name}"}
data:
  train:
    env_name: arithmetic
env:
  arithmetic: {}
checkpointing:
  metric_name: null
"""
SFT = """\
sft: {val_period: 0}
policy: {model_name: m, device: cpu}
data:
  train: {dataset_name: rows.jsonl, input_key: question, output_key: answer}
checkpointing: {metric_name: null}
"""
PAIRS = ("policy.model_name=m", "policy.device=cpu", "dpo.val_period=0", "checkpointing.metric_name=null")
MATH = ("env.math={}", "data.train.env_name=math", "data.train.dataset_name=rows.jsonl", "data.train.input_key=question")
MINE = "data.train={dataset_name: rows.jsonl, env_name: mine, input_key: question}"
HEADS = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 14, "num_key_value_heads": 2}
COMMAND_LINE, FILE = "command line", "run.yaml"
PER_STEP, KWARGS, TENSOR = "grpo.num_prompts_per_step", "policy.optimizer.kwargs", "policy.dtensor_cfg.tensor_parallel_size"


@dataclass(frozen=True)
class Mistake:
    """A command with a mistake, and what its message must have."""

    words: tuple[str, ...]  # of the command line, after `strop grpo --config run.yaml`, or all of it with ``whole``
    key: str  # that is named first, after the place
    said: str  # what was found, and why it cannot work
    fix: str  # what to set instead
    place: str = COMMAND_LINE
    file: str | bytes = RUN
    whole: bool = False

    @property
    def command(self) -> list[str]:
        return list(self.words) if self.whole else ["grpo", "--config", FILE, *self.words]


def typed(words: str | tuple[str, ...], key: str, said: str, fix: str, *, place: str = COMMAND_LINE) -> Mistake:
    return Mistake((words,) if isinstance(words, str) else words, key, said, fix, place)


def command(words: str, key: str, said: str, fix: str, *, place: str = "", more: tuple[str, ...] = ()) -> Mistake:
    return Mistake((*words.split(), *more), key, said, fix, place, whole=True)


def written(
    old: str, new: str, key: str, said: str, fix: str, *, line: int | None = None, words: tuple[str, ...] = ()
) -> Mistake:
    """A mistake in the file: ``new`` stands there in place of ``old``; ``line`` is where it is found."""
    assert old in RUN
    return Mistake(words, key, said, fix, FILE if line is None else f"{FILE}, line {line}", RUN.replace(old, new, 1))


def text(file: str | bytes, said: str, fix: str, *, line: int | None = None, key: str = "") -> Mistake:
    return Mistake((), key, said, fix, FILE if line is None else f"{FILE}, line {line}", file)


VALUES = [
    typed(f"{PER_STEP}=many", PER_STEP, "found 'many' (a text)", "it must be int >= 1"),
    typed(f'{PER_STEP}="8"', PER_STEP, "found '8' (a text)", "it must be int >= 1"),
    typed(f"{PER_STEP}=8.0", PER_STEP, "found 8.0 (a number)", "it must be int >= 1"),
    typed(f"{PER_STEP}=-3", PER_STEP, "found -3 (a whole number)", "it must be int >= 1"),
    typed(f"{PER_STEP}=0", PER_STEP, "found 0 (a whole number)", "it must be int >= 1"),
    typed(f"{PER_STEP}=[1]", PER_STEP, "found [1] (a list)", "it must be int >= 1"),
    typed(f"{PER_STEP}=true", PER_STEP, "found True (true or false)", "it must be int >= 1"),
    typed(f"{PER_STEP}={{a: 1}}", PER_STEP, "found {'a': 1} (a mapping)", "it must be int >= 1"),
    typed(f"{PER_STEP}=${{env:STROP_UNSET}}", PER_STEP, "variable STROP_UNSET is not set", "export STROP_UNSET="),
    typed(f"{PER_STEP}=${{unknown:1}}", PER_STEP, "there is no resolver unknown", "there are: add, div"),
    typed(f"{PER_STEP}=${{grpo.num_promts}}", PER_STEP, "there is no key grpo.num_promts",
        "Did you mean ${grpo.num_prompts_per_step}"),
    typed("logger.log_dir=${logger.log_dir}", "logger.log_dir", "it refers to itself", "logger.log_dir"),
    typed("logger.log_dir=${", "logger.log_dir", "cannot be read as an interpolation", "write ${section.key}"),
    typed("policy.model_name=${env:STROP_UNSET}", "policy.model_name", "STROP_UNSET is not set", "export STROP_UNSET="),
    typed("grpo.seed=", "grpo.seed", "found None (null)", "it must be int >= 0"),
    typed("grpo.seed=1.5", "grpo.seed", "found 1.5 (a number)", "it must be int >= 0"),
    typed("grpo.val_period=often", "grpo.val_period", "found 'often'", "0 turns it off"),
    typed("grpo.max_num_steps=-5", "grpo.max_num_steps", "found -5", "-1 never does"),
    typed("grpo.normalize_rewards=maybe", "grpo.normalize_rewards", "found 'maybe'", "true or false"),
    typed("loss_fn.ratio_clip_min=20%", "loss_fn.ratio_clip_min", "found '20%'", "float >= 0 and <= 1"),
    typed("loss_fn.ratio_clip_max=-1", "loss_fn.ratio_clip_max", "found -1", "float >= 0"),
    typed("loss_fn.reference_policy_kl_penalty=-0.1", "loss_fn.reference_policy_kl_penalty", "found -0.1", "float >= 0"),
    typed("policy.generation.top_p=90%", "policy.generation.top_p", "found '90%'", "float > 0 and <= 1"),
    typed("policy.generation.temperature=-1", "policy.generation.temperature", "found -1", "0 is greedy"),
    typed("policy.generation.stop_token_ids=eos", "policy.generation.stop_token_ids", "found 'eos'", "list of int"),
    typed("policy.generation.stop_strings=[1]", "policy.generation.stop_strings", "found 1", "Put it in quotes"),
    typed("policy.precision=float16", "policy.precision", "float16 needs loss scaling", "set bfloat16 or float32"),
    typed("policy.precision=fp8", "policy.precision", "found 'fp8'", "one of bfloat16, float32"),
    typed("policy.device=cuda9", "policy.device", "found 'cuda9'", "like auto, cpu, cuda, cuda:1"),
    typed("checkpointing.checkpoint_must_save_by=4h", "checkpointing.checkpoint_must_save_by", "found '4h'", "like 00:04:00:00"),
    typed("policy.generation.backend=onnx", "policy.generation.backend", "found 'onnx'", "one of auto, torch, vllm"),
]  # fmt: skip
OPTIMIZERS = [
    typed(f"{KWARGS}.learning_rate=1e-5", f"{KWARGS}.learning_rate", "takes no argument learning_rate",
        f"Did you mean {KWARGS}.lr?"),
    typed(f"{KWARGS}.beta=[0.9, 0.99]", f"{KWARGS}.beta", "takes no argument beta", f"Did you mean {KWARGS}.betas?"),
    typed(f"{KWARGS}={{betas: [0.9, 0.99]}}", KWARGS, "it has no lr", "for instance to 5e-6"),
    typed(f"{KWARGS}={{lr: 1e-5, betas: [0.9, 1.5]}}", f"{KWARGS}.betas", "found [0.9, 1.5]", "For instance [0.9, 0.999]"),
    typed(f"{KWARGS}={{lr: 1e-5, weight_decay: -1}}", f"{KWARGS}.weight_decay", "found -1", "such as 0.01"),
    typed(f"{KWARGS}.lr=5", f"{KWARGS}.lr", "found 5; it must be a number from 0 to 1", "such as 5e-6"),
    typed(f"{KWARGS}.lr=-1e-6", f"{KWARGS}.lr", "found -1e-06", "such as 5e-6"),
    typed(f"{KWARGS}.lr=1e-6x", f"{KWARGS}.lr", "found '1e-6x'", "such as 5e-6"),
    typed(f"{KWARGS}.lr='1e-6'", f"{KWARGS}.lr", "found '1e-6'", "without quotes"),
    typed(f"{KWARGS}.lr=”1e-6”", f"{KWARGS}.lr", "found '”1e-6”'", "” (U+201D)"),
    typed(f"{KWARGS}.lr=null", f"{KWARGS}.lr", "found None", "such as 5e-6"),
    typed("policy.optimizer.name=torch.optim.AdamX", "policy.optimizer.name", "'torch.optim.AdamX' does not name",
        "torch.optim.AdamW"),
    typed("policy.optimizer.name=adamw", "policy.optimizer.name", "'adamw' does not name a class", "like torch.optim.AdamW"),
    typed("policy.scheduler={name: cosin}", "policy.scheduler.name", "cosin", "did you mean 'cosine'?"),
    typed("policy.scheduler={name: cosine, kwargs: {warmup: 3}}", "policy.scheduler.kwargs.warmup", "no such argument",
        "did you mean 'warmup_steps'?"),
    typed("policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {start: 0.1}}", "policy.scheduler.kwargs.start",
        "LinearLR takes", "start_factor"),
]  # fmt: skip
KEYS = [
    typed("grpo.num_promts_per_step=4", "grpo.num_promts_per_step", "there is no such key", f"Did you mean {PER_STEP}?"),
    typed("polcy.model_name=x", "polcy", "there is no such key", "Did you mean policy?"),
    typed("policy.optimzer.kwargs.lr=1e-5", "policy.optimzer", "there is no such key", "Did you mean policy.optimizer?"),
    typed("grpo.learning_rate=1e-5", "grpo.learning_rate", "there is no such key", f"Did you mean {KWARGS}.lr?"),
    typed("policy.lora.rank=8", "policy.lora", "there is no such key", "Did you mean policy.dtensor_cfg.lora_cfg?"),
    typed("policy.temperature=1", "policy.temperature", "there is no such key", "Did you mean policy.generation.temperature?"),
    typed("logger.wandb.enable=true", "logger.wandb.enable", "there is no such key", "Did you mean logger.wandb_enabled?"),
    typed("logger.wandb.team=me", "logger.wandb.team", "there is no such key", "The keys of logger.wandb are "),
    typed("data.train.weigth=2", "data.train.weigth", "there is no such key", "Did you mean data.train.weight?"),
    typed("data.train.3.weight=2", "data.train.3.weight", "data.train has one entry", "Write data.train.weight="),
    typed("grpo=5", "grpo", "this is a section", "Its keys: "),
    typed("grpo.seed", "", "'grpo.seed' is not an override", "Write section.key=value"),
    typed("=3", "", "'=3' is not an override", "Write section.key=value"),
    typed("~unset", "~unset", "unset is not set", "~key removes a key that the file sets"),
    typed("~policy.devcie", "~policy.devcie", "policy.devcie is not set", "Did you mean ~policy.device?"),
    typed("~policy.model_name", "policy.model_name", "this key is required", "Write policy.model_name=", place=f"{FILE}, line 5"),
    typed("algorithm.name=dpo", "algorithm.name", "belongs to strop dpo", "run strop dpo"),
    typed("algorithm.name=grop", "algorithm.name", "'grop' is neither", "did you mean 'grpo'?"),
    typed("algorithm.kwargs.kl_weight=3", "algorithm.kwargs.kl_weight", "grpo has no such field", "there are: advantage"),
    typed("grpo.adv_estimator.name=gea", "grpo.adv_estimator.name", "'gea' is not a known advantage", "did you mean 'gae'?"),
]
FILES = [
    written("  num_prompts", "\u00a0\u00a0num_prompts", "", "U+00A0 is used instead of a space", "write a plain space", line=2),
    written("  val_period", "\tval_period", "", "not valid YAML", "'\\t'", line=4),
    written("val_period: 0", "val_period: 0\n  val_period: 1", "", "grpo.val_period occurs twice", "first on line 4", line=5),
    written("device: cpu", "device: *x", "", "undefined alias 'x'", "line 7, column 11", line=7),
    written("model_name: m", "model_nаme: m", "policy.model_nаme", "there is no such key", "Did you mean policy.model_name?",
        line=6),
    written("model_name: m", "model_name: ???", "policy.model_name", "found ???", "Set it: policy.model_name=", line=6),
    written("model_name: m", "model_name: null", "policy.model_name", "found null", "Set policy.model_name=", line=6),
    written("env:\n", "logger: {log_dir: x\nenv:\n", "", "not valid YAML", "line 14", line=14),
    text(f"{RUN}grpo: {{}}\n", "the key grpo occurs twice", "first on line 1", line=17),
    text(f"{RUN}seed: 3\n", "there is no such key", "Did you mean grpo.seed", line=17, key="seed"),
    text(f"defaults: nope.yaml\n{RUN}", "there is no file nope.yaml", "there are: run.yaml", key="defaults"),
    text("- a\n- b\n", "found a list", "a configuration is a mapping of sections"),
    text("", "this key is required", "Write policy.model_name=", key="policy.model_name"),
    Mistake((), "", "run.yaml is not a UTF-8 text file", "at byte 104", "",
        RUN.replace("model_name: m", "model_name: é").encode("latin-1")),
    Mistake((), "", "is a configuration of `strop sft`", "Start strop sft --config run.yaml", "", SFT),
]  # fmt: skip
COMMANDS = [
    command("grpo --config nofile.yaml", "", "there is no file nofile.yaml", "there are: run.yaml"),
    command("grpo run.yaml", "", "'run.yaml' is not an override", "write --config run.yaml", place=COMMAND_LINE),
    command("grpo", "policy.model_name", "this key is required", "Write policy.model_name="),
    command("sft --config run.yaml", "", "is a configuration of `strop grpo`", "Start strop grpo --config run.yaml"),
    command("gpro --config run.yaml", "", "there is no command 'gpro'", "did you mean 'grpo'?"),
    command("eval --config nope.yaml", "", "there is no file nope.yaml", "there are: run.yaml"),
    command("dpo", "data.train.dataset_name", "pairs.jsonl:1 has the keys", "Set chosen_key", place=COMMAND_LINE,
            more=(*PAIRS, "data.train.dataset_name=pairs.jsonl")),
]  # fmt: skip
NAMED = [
    typed((*MATH, "data.train.dataset_name=no_such.jsonl"), "data.train.dataset_name", "there is no file no_such.jsonl", "Set the path"),
    typed((*MATH, "data.train.dataset_name=gsm8kk"), "data.train.dataset_name", "'gsm8kk' is not a file", "did you mean 'gsm8k'?"),
    typed((*MATH, "data.train.dataset_name=bad.jsonl"), "data.train.dataset_name", "bad.jsonl:1 is not JSON", "one JSON object"),
    typed((*MATH, "data.train.dataset_name=empty.jsonl"), "data.train.dataset_name", "is empty", "needs at least one row"),
    typed((*MATH, "data.train.input_key=quest"), "data.train.input_key", "has no key 'quest'", "did you mean 'question'?"),
    typed((*MATH, "data.train.dataset_name=“gsm8k”"), "data.train.dataset_name", "“gsm8k”", "did you mean 'gsm8k'?"),
    typed(("data.train={dataset_name: ResponseDataset, env_name: math}", "env.math={}"), "data.train.dataset_name", "no data_path",
          "Set data.train.data_path"),
    typed((*MATH, "data.train.prompt_file=nope.txt"), "data.train.prompt_file", "there is no file nope.txt", "Set the path"),
    typed("data.train.env_name=aritmetic", "data.train.env_name", "found 'aritmetic'", "env has arithmetic"),
    typed(("env.foo={}", "data.train.env_name=foo"), "env.foo", "there is no environment 'foo'", "there are: agent, arithmetic"),
    typed("env.arithmetic.max_operands=3", "env.arithmetic.max_operands", "has no option 'max_operands'", "did you mean 'max_operand'?"),
    typed("env.arithmetic.max_operand=big", "env.arithmetic.max_operand", "is 'big'", "valid integer"),
    typed(("env.mine={reward: 'rewards.py:bad'}", MINE), "env.mine.reward", "'rewards.py' has no 'bad'", "there are: good"),
    typed(("env.mine={reward: 'nope.py:good'}", MINE), "env.mine.reward", "importing 'nope.py' failed", "there is no file"),
    typed(("env.mine={rewards: {right: {verifier: math}, format: {verifier: tagz, tags: [a]}}}", MINE), "env.mine.rewards.format.verifier",
          "there is no verifier 'tagz'", "did you mean 'tags'?"),
    typed(("env.mine={rewards: {right: {verifier: math}, long: {verifier: length, limit: 9, gate: rigt}}}", MINE),
          "env.mine.rewards.long.gate", "'rigt', which is not a reward", "did you mean 'right'?"),
    typed(("env.mine={rewards: {right: {verifier: math, weigth: 2}}}", MINE), "env.mine.rewards.right.weigth", "has no option 'weigth'",
          "did you mean 'weight'?"),
    typed(("env.mine={rewards: {right: {verifier: math, weight: {schedul: linear}}}}", MINE), "env.mine.rewards.right.weight.schedul",
          "the weight of the reward right has no option", "did you mean 'schedule'?"),
    typed("policy.tokenizer.tool_call_format=hermess", "policy.tokenizer.tool_call_format", "no tool call format 'hermess'", "'hermes'?"),
    typed("policy.model_name=./nope", "policy.model_name", "there is no folder ./nope", "Set it to a folder with a model"),
    typed("policy.model_name=$HF_HOME/model", "policy.model_name", "'$HF_HOME/model' is neither", "${oc.env:NAME}"),
    typed("policy.tokenizer.chat_template=nope.jinja", "policy.tokenizer.chat_template", "found 'nope.jinja'", "Set it to an existing"),
    typed("policy.tokenizer.chat_template='{% for %}'", "policy.tokenizer.chat_template", "it is no Jinja template", "Mend the template"),
    typed("checkpointing.checkpoint_dir=rows.jsonl", "checkpointing.checkpoint_dir", "rows.jsonl is a file", "set another folder"),
    typed("logger.log_dir=rows.jsonl/logs", "logger.log_dir", "rows.jsonl is a file", "set another folder"),
]  # fmt: skip
SIZES = [
    typed("policy.train_global_batch_size=100", "policy.train_global_batch_size", "found 100, but a step has", "one of 512, 256"),
    typed(("policy.max_total_sequence_length=128", "policy.generation.max_new_tokens=256"), "policy.generation.max_new_tokens",
          "found 256, more than", "Lower it"),
    typed("cluster.gpus_per_node=0", "cluster.gpus_per_node", "no device to train", "Set it to 1 or more"),
    typed(("cluster.gpus_per_node=8", f"{TENSOR}=3", "policy.device=auto"), TENSOR, "do not divide 8 devices", "a multiple of 3"),
    typed("policy.dtensor_cfg.context_parallel_size=3", "policy.dtensor_cfg.context_parallel_size", "found 3", "a multiple of 3"),
    typed(("policy.model_name=heads", "cluster.gpus_per_node=4", f"{TENSOR}=4"), TENSOR, "does not divide the 14 attention heads",
          "one of 1, 2, 7, 14"),
    typed(("policy.model_name=heads", "policy.generation.backend=vllm", "policy.generation.vllm_cfg.tensor_parallel_size=4",
           "cluster.gpus_per_node=4"), "policy.generation.vllm_cfg.tensor_parallel_size", "vLLM cannot divide", "one of 1, 2, 7, 14"),
    typed("grpo.num_generations_per_prompt=1", "grpo.num_generations_per_prompt", "the group size is 1", "to 2 or more"),
    typed(("algorithm.name=gspo", "loss_fn.token_level_loss=true"), "loss_fn.token_level_loss", "has one ratio per rollout",
          "loss_fn.token_level_loss=false"),
    typed(("grpo.advantage_clip_low=3", "grpo.advantage_clip_high=1"), "grpo.advantage_clip_low", "which is empty", "below"),
]  # fmt: skip
MISTAKES = [*VALUES, *OPTIMIZERS, *KEYS, *FILES, *COMMANDS, *NAMED, *SIZES]
IDS = [" ".join(mistake.words) or mistake.said for mistake in MISTAKES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STROP_UNSET", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "2"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": 1\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rewards.py").write_text("def good(prompts, completions):\n    return [1.0] * len(completions)\n")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text(json.dumps(HEADS))
    return tmp_path


def write_file(folder: Path, mistake: Mistake) -> None:
    content = mistake.file if isinstance(mistake.file, bytes) else mistake.file.encode()
    (folder / FILE).write_bytes(content)


def start(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as ended:  # argparse
        return int(ended.code or 0)


def assert_says(mistake: Mistake, said: str) -> None:
    """Check that a message has one problem, in the right place, at the right key, with its reason and its fix."""
    assert "Traceback" not in said and "problems in the configuration" not in said, said
    first = next(line for line in said.splitlines() if "error: " in line)
    place = f"{mistake.place}: " if mistake.place and mistake.key else mistake.place  # without a key, a column may follow
    assert first.partition("error: ")[2].startswith(f"{place}{mistake.key}"), said
    assert mistake.said in said and mistake.fix in said, said


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_a_dry_run_names_place_key_and_fix_of_a_mistake(
    mistake: Mistake, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(folder, mistake)
    assert start([*mistake.command, "--dry-run"]) == 2
    assert_says(mistake, capsys.readouterr().err)


@pytest.mark.parametrize("mistake", one_in(8, MISTAKES), ids=IDS)
def test_a_run_refuses_a_mistake_before_it_loads_a_model(
    mistake: Mistake, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def note(*arguments: Any, **_: Any) -> Any:
        loaded.append(arguments)
        raise AssertionError("a model is loaded")

    if mistake in (*NAMED, *SIZES, *OPTIMIZERS, *COMMANDS):  # what is refused before all else never imports torch
        from strop.models import loading

        monkeypatch.setattr(loading, "from_pretrained", note)
    write_file(folder, mistake)
    assert start(mistake.command) in (1, 2) and not loaded
    said = capsys.readouterr().err
    assert "Traceback" not in said and mistake.said in said, said


def test_an_export_names_its_own_argument(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(["export", "./nope", "out"]) == 2
    assert "./nope" in capsys.readouterr().err
