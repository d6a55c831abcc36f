"""The overrides of hydra in a shell script: what follows the Python command that starts verl.

Only what a script says by itself is read: assignments, ``$VAR``, ``${VAR:-default}``, arrays and whole-number arithmetic. Nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.config.source import yaml_text
from strop.config.source.yaml_source import ConfigSource, describe_missing_file, parse_once
from strop.extensions.recipes.library_recipe import LibraryRecipe, ReadRecipe, RecipeFormat, apply_table
from strop.extensions.recipes.rules import Effect
from strop.extensions.recipes.verl.verl_keys import VERL_PPO_KEYS, VERL_SFT_KEYS
from strop.problems import ConfigError, Origin, Problem

ASSIGNMENT = re.compile(r"\s*(?:export\s+|declare\s+(?:-\w\s+)*|local\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
SEVERAL = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>[^\s;'\"()]*);\s*(?P<rest>.+)", re.DOTALL)
OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w./@]*)=(?P<value>.*)", re.DOTALL)
VARIABLE = re.compile(
    r"\$\(\((?P<sum>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)"
    r"|\$\{(?P<name>[A-Za-z_]\w*|\d+)(?::?(?P<operator>[-=+])(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}"
    r"|\$\{(?P<array>[A-Za-z_]\w*)\[[@*]\]\}"
    r"|\$(?P<bare>[A-Za-z_]\w*)"
)
COMMAND = re.compile(
    r"verl(?:\.trainer)?[./](?:trainer[./])?(?P<module>main_ppo|fsdp_sft_trainer|sft_trainer|main_generation|main_eval)"
)
SPACED_SUM = re.compile(r"\$\(\(.*?\)\)+")
ARITHMETIC = re.compile(r"[\d\s()+*/%-]+")
MOST_EXPANSIONS = 20  # of variables inside variables


@dataclass
class ShellScript:
    """What a script starts."""

    overrides: dict[str, str] = field(default_factory=dict)  # as text, the last one of a key
    lines: dict[str, int] = field(default_factory=dict)  # of each override: where its command begins
    module: str | None = None  # the Python module; None for a plain list of overrides
    flags: dict[str, str] = field(default_factory=dict)  # --config-name, --nproc_per_node
    unassigned: dict[str, str] = field(default_factory=dict)  # variables that stay, with a key that they are in
    has_conditions: bool = False


def read_script(text: str) -> ShellScript:
    """Read a script, or a plain list of overrides. Raises ValueError for quotes that do not end."""
    script, variables = ShellScript(), {}
    for number, line in _join_lines(text):
        stripped = line.strip()
        while several := SEVERAL.fullmatch(stripped):
            variables[several["name"]] = several["value"]
            stripped = several["rest"]
        if re.match(r"(?:if|for|while|case)\b", stripped):
            script.has_conditions = True
        assigned = ASSIGNMENT.fullmatch(stripped)
        words = _split(stripped)
        if assigned and (len(words) == 1 or assigned["value"].startswith("(") or not COMMAND.search(stripped)):
            variables[assigned["name"]] = _unquote_assigned(assigned["value"])
            continue
        command = COMMAND.search(_expand(stripped, variables, {}, ""))
        plain = bool(words) and all(OVERRIDE.fullmatch(word) and "." in word.partition("=")[0] for word in words)
        if command is not None or plain:
            script.module = script.module or (command["module"] if command else None)
            _read_command(words, variables, script, number)
    return script


def _join_lines(text: str) -> list[tuple[int, str]]:
    """Return the commands with the number of their first line: continued lines, and arrays in parentheses, are one."""
    joined: list[tuple[int, str]] = []
    open_array = False
    continues = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw) if not _inside_quotes(raw) else raw
        body = line.rstrip()
        body = SPACED_SUM.sub(lambda match: match[0].replace(" ", ""), body).replace("$(pwd)", ".")
        goes_on = body.endswith("\\")
        body = body.removesuffix("\\")
        if (continues or open_array) and joined:
            joined[-1] = (joined[-1][0], f"{joined[-1][1]} {body}")
        else:
            joined.append((number, body))
        if re.fullmatch(r"\s*(?:export\s+|declare\s+-a\s+)?[A-Za-z_]\w*=\([^)]*", body):
            open_array = True
        elif open_array and ")" in body:
            open_array = False
        continues = goes_on
    return joined


def _inside_quotes(line: str) -> bool:
    """Return whether a # of a line may be part of a text."""
    before = line.partition("#")[0]
    return before.count("'") % 2 == 1 or before.count('"') % 2 == 1


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=False, posix=True)
    except ValueError:
        return []


def _unquote_assigned(value: str) -> str:
    value = value.strip().rstrip(";").strip()
    if value.startswith("(") and value.endswith(")"):
        return value[1:-1]  # an array, split where it is used
    words = _split(value) if value[:1] in ("'", '"') or " " not in value else []
    return words[0] if len(words) == 1 else value


def _read_command(words: list[str], variables: dict[str, str], script: ShellScript, number: int) -> None:
    expanded: list[str] = []
    for word in words:
        array = re.fullmatch(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\]\})?\}?", word)
        whole = array is not None and array[1] in variables and ("[" in word or "=" in variables[array[1]])
        expanded += _split(variables[array[1]]) if whole and array is not None else [word]
    for position, word in enumerate(expanded):
        flag = re.fullmatch(r"--(config[-_](?:name|path)|nnodes|nproc[-_]per[-_]node)(?:=(.*))?", word)
        if flag is not None:
            value = flag[2] if flag[2] is not None else "".join(expanded[position + 1 : position + 2])
            script.flags[flag[1].replace("_", "-")] = _expand(value, variables, {}, "")
        match = OVERRIDE.fullmatch(word)
        if match is None or word.startswith("-"):
            continue
        if "." in match["key"] or match["key"] in ("ulysses_sequence_parallel_size", "use_remove_padding"):
            script.overrides[match["key"]] = _expand(match["value"], variables, script.unassigned, match["key"])
            script.lines[match["key"]] = number


def _expand(text: str, variables: dict[str, str], unassigned: dict[str, str], key: str, depth: int = 0) -> str:
    """Return a text with the variables that the script assigns; another one becomes ``${oc.env:NAME}`` and is named."""

    def replace(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _calculate(match["sum"], variables, depth) or match[0]
        name = match["name"] or match["array"] or match["bare"]
        if name == "PWD":
            return "."
        if name in variables and match["operator"] == "+":
            return _expand(match["default"], variables, unassigned, key, depth + 1)
        if name in variables and depth < MOST_EXPANSIONS:
            value = variables[name]
            if re.fullmatch(rf"\$\{{{name}(?::?[-=](?:.*))?\}}", value):  # NAME=${NAME:-default}
                inner = VARIABLE.fullmatch(value)
                value = (inner["default"] or "").strip("'\"") if inner else ""
            return _expand(value, variables, unassigned, key, depth + 1)
        if match["operator"] == "+":
            return ""
        if match["default"] is not None:
            return _expand(match["default"].strip("'\""), variables, unassigned, key, depth + 1)
        if name.isdigit():
            return ""
        unassigned[name] = key
        return f"${{oc.env:{name}}}"

    return VARIABLE.sub(replace, text)


def _calculate(expression: str, variables: dict[str, str], depth: int) -> str | None:
    """Return the value of whole-number arithmetic; None for any other."""
    named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: f"${{{match[1]}}}", expression)
    text = _expand(named, variables, {}, "", depth + 1) if depth < MOST_EXPANSIONS else named
    if len(text) > 200 or not ARITHMETIC.fullmatch(text) or "**" in text:
        return None
    try:
        return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError):
        return None


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_evaluate(left), _evaluate(right))
    raise SyntaxError("only whole numbers and + - * / % are computed")


_OPTIMIZER: Mapping[str, Any] = {
    "optimizer": "AdamW", "optimizer_impl": "torch.optim", "lr_warmup_steps_ratio": 0.0, "weight_decay": 0.01, "lr_warmup_steps": -1,
    "betas": [0.9, 0.999], "clip_grad": 1.0, "min_lr_ratio": 0.0, "num_cycles": 0.5, "lr_scheduler_type": "constant",
    "warmup_style": None, "lr_warmup_init": 0.0, "min_lr": 0.0, "lr_decay_steps": None, "weight_decay_incr_style": "constant",
    "lr_wsd_decay_style": "exponential", "lr_wsd_decay_steps": None, "lr_decay_style": None,
    "override_optimizer_config": None, "total_training_steps": -1,
}  # fmt: skip
_MEGATRON: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True,
}  # fmt: skip


def _inside(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


TRAINER: Mapping[str, Any] = _inside("trainer", {
    "total_epochs": 30, "total_training_steps": None, "project_name": "verl_examples", "experiment_name": "gsm8k",
    "logger": ["console", "wandb"], "nnodes": 1, "n_gpus_per_node": 8, "save_freq": -1, "test_freq": -1, "val_before_train": True,
    "val_only": False, "critic_warmup": 0, "resume_mode": "auto", "resume_from_path": None, "log_val_generations": 0,
    "max_actor_ckpt_to_keep": None, "default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    "device": "cuda",
})  # fmt: skip

PPO_DEFAULTS: Mapping[str, Any] = {
    **TRAINER,
    **_inside("data", {
        "train_files": "~/data/rlhf/gsm8k/train.parquet", "val_files": "~/data/rlhf/gsm8k/test.parquet", "train_max_samples": -1,
        "val_max_samples": -1, "prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 512, "max_response_length": 512,
        "train_batch_size": 1024, "shuffle": True, "seed": None, "filter_overlong_prompts": False, "truncation": "error",
        "image_key": "images",
        "video_key": "videos", "apply_chat_template_kwargs": {}, "gen_batch_size": None, "return_raw_chat": True,
    }),
    **_inside("actor_rollout_ref.model", {
        "path": "~/models/deepseek-llm-7b-chat", "tokenizer_path": None, "trust_remote_code": False, "custom_chat_template": None,
        "override_config": {}, "enable_gradient_checkpointing": True, "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear",
        "exclude_modules": None, "lora_adapter_path": None, "external_lib": None,
    }),
    **_inside("actor_rollout_ref.actor", {
        "strategy": "fsdp", "ppo_mini_batch_size": 256, "ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": None,
        "use_dynamic_bsz": False, "ppo_max_token_len_per_gpu": 16384, "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None, "entropy_coeff": 0,
        "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "ppo_epochs": 1, "grad_clip": 1.0,
        "ulysses_sequence_parallel_size": 1, "router_replay.mode": "disabled",
    }),
    **_inside("actor_rollout_ref.actor.policy_loss", {
        "loss_mode": "vanilla", "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002,
        "ppo_kl_coef": 0.1,
    }),
    **_inside("actor_rollout_ref.actor.optim", {**_OPTIMIZER, "lr": 1e-6}),
    **_inside("actor_rollout_ref.actor.fsdp_config", {"fsdp_size": -1, "model_dtype": "fp32", "dtype": "bfloat16", "strategy": "fsdp"}),
    **_inside("actor_rollout_ref.actor.megatron", _MEGATRON),
    **_inside("actor_rollout_ref.ref", {"fsdp_config.param_offload": False, "log_prob_micro_batch_size_per_gpu": None}),
    **_inside("actor_rollout_ref.rollout", {
        "name": None, "temperature": 1.0, "top_k": -1, "top_p": 1, "n": 1, "dtype": "bfloat16", "gpu_memory_utilization": 0.5,
        "enforce_eager": False, "tensor_model_parallel_size": 2, "data_parallel_size": 1, "expert_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "max_model_len": None, "max_num_seqs": 256, "enable_prefix_caching": True, "ignore_eos": False,
        "do_sample": True, "val_kwargs.top_k": -1, "val_kwargs.top_p": 1.0, "val_kwargs.temperature": 0, "val_kwargs.n": 1,
        "val_kwargs.do_sample": False, "multi_turn.enable": False, "multi_turn.max_assistant_turns": None,
        "agent.default_agent_loop": "single_turn_agent", "logprobs_mode": "processed_logprobs", "log_prob_use_dynamic_bsz": None,
        "multi_turn.format": "hermes",
    }),
    **_inside("critic", {
        "strategy": "fsdp", "cliprange_value": 0.5, "grad_clip": 1.0, "ulysses_sequence_parallel_size": 1,
        "model.path": "~/models/deepseek-llm-7b-chat", "model.enable_gradient_checkpointing": True, "model.lora_rank": 0,
        "model.lora_alpha": 16, "model.target_modules": "all-linear", "model.trust_remote_code": False,
    }),
    **_inside("critic.optim", {**_OPTIMIZER, "lr": 1e-5}),
    **_inside("algorithm", {
        "gamma": 1.0, "lam": 1.0, "adv_estimator": "gae", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False, "kl_penalty": "kl",
        "kl_ctrl.type": "fixed", "kl_ctrl.kl_coef": 0.001, "kl_ctrl.horizon": 10000, "kl_ctrl.target_kl": 0.1, "use_pf_ppo": False,
    }),
    **_inside("algorithm.rollout_correction", {
        "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False,
        "loss_type": "ppo_clip", "rollout_is_batch_normalize": False,
    }),
    **_inside("reward_model", {"enable": False, "reward_manager": "naive", "model.path": "~/models/FsfairX-LLaMA3-RM-v0.1"}),
    "custom_reward_function.path": None, "custom_reward_function.name": "compute_score", "transfer_queue.enable": False,
}  # fmt: skip

SFT_DEFAULTS: Mapping[str, Any] = {
    **TRAINER, "trainer.total_epochs": 4, "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test", "trainer.seed": 1,
    "trainer.max_ckpt_to_keep": None,
    **_inside("data", {
        "train_batch_size": 256, "micro_batch_size_per_gpu": 4, "train_files": "~/data/gsm8k/train.parquet",
        "val_files": "~/data/gsm8k/test.parquet", "train_max_samples": -1, "val_max_samples": -1, "prompt_key": "question",
        "response_key": "answer", "prompt_dict_keys": None, "response_dict_keys": None, "multiturn.enable": False,
        "multiturn.messages_key": "messages", "max_length": 1024, "truncation": "error", "chat_template": None,
        "apply_chat_template_kwargs": {}, "messages_key": "messages", "use_dynamic_bsz": False, "max_token_len_per_gpu": 8192,
    }),
    **_inside("model", {
        "partial_pretrain": "~/models/gemma-1.1-7b-it", "path": None, "enable_gradient_checkpointing": True, "trust_remote_code": False,
        "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "strategy": "fsdp2", "fsdp_config.model_dtype": "fp32",
        "external_lib": None,
    }),
    **_inside("optim", {
        **_OPTIMIZER, "lr": 1e-5, "betas": [0.9, 0.95], "lr_warmup_steps_ratio": 0.1, "clip_grad": 1.0, "lr_scheduler": "cosine",
    }),
    "ulysses_sequence_parallel_size": 1, "engine.strategy": "fsdp",
}  # fmt: skip


REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:)?\s*(?P<key>\.*[A-Za-z_][\w.]*)\s*(?:,(?P<default>[^${}]*))?\}")
SFT_MODULES = ("fsdp_sft_trainer", "sft_trainer")
OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
MOST_REFERENCES = 10  # that follow each other


def is_verl(values: Mapping[str, Any]) -> bool:
    """Return whether a file has the sections of verl's trainers."""
    is_sft = "trainer" in values and "optim" in values and isinstance(values.get("model"), Mapping)
    return "actor_rollout_ref" in values or is_sft


def read_verl(path: Path) -> ReadRecipe:
    """Translate a file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([describe_missing_file(path, (), error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}")]) from error
    try:
        parsed, lines = parse_once(text)
    except yaml_text.YamlError:
        parsed, lines = None, {}
    if isinstance(parsed, dict) and path.suffix != ".sh":
        parsed.pop("defaults", None)
        if not is_verl(parsed):
            return ReadRecipe(None, ConfigSource(files=(path,)))
        values, script = _flatten(parsed), ShellScript()
        origins = {".".join(key): Origin(path, line) for key, line in lines.items()}
    else:
        script = read_script(text)
        values = _read_own_config(path, script) | {key: _parse(value) for key, value in script.overrides.items()}
        origins = {key: Origin(path, line) for key, line in script.lines.items()}
        _check_script(path, script)
    is_sft = script.module in SFT_MODULES or (
        script.module is None and "actor_rollout_ref" not in {key.split(".")[0] for key in values}
    )
    return _translate(path, values, origins, script, is_sft=is_sft)


def _read_own_config(path: Path, script: ShellScript) -> dict[str, Any]:
    """Return what a file that --config-name names sets on top of verl's own, if it is here; forget the name of such a file."""
    stem = Path(script.flags.get("config-name", "")).stem
    if not stem or stem in OWN_CONFIGS:
        return {}
    for folder in (Path(), *path.resolve().parents):
        file = folder / script.flags.get("config-path", "") / f"{stem}.yaml"
        if file.is_file():
            try:
                parsed, _ = parse_once(file.read_text(encoding="utf-8-sig"))
            except (OSError, UnicodeDecodeError, yaml_text.YamlError):
                return {}
            bases = [base for base in parsed.pop("defaults", []) if base in OWN_CONFIGS]
            script.flags["config-name"] = bases[0] if bases else OWN_CONFIGS[0]
            return {key: value for key, value in _flatten(parsed).items() if not key.startswith("hydra.")}
    return {}


def _check_script(path: Path, script: ShellScript) -> None:
    if script.module in ("main_generation", "main_eval"):
        fix = "Run `strop eval`, or `strop rollouts`, in its place."
        raise ConfigError([Problem("", f"{path} starts verl.trainer.{script.module}, which trains nothing", fix)])
    if not script.overrides:
        message = (
            f"{path} has no command of verl's with overrides, such as python3 -m verl.trainer.main_ppo data.train_batch_size=256"
        )
        raise ConfigError([Problem("", message, "Name the script that starts verl, or the config.yaml that hydra writes.")])


def _translate(
    path: Path, values: dict[str, Any], origins: Mapping[str, Origin], script: ShellScript, *, is_sft: bool
) -> ReadRecipe:
    defaults = dict(SFT_DEFAULTS if is_sft else PPO_DEFAULTS)
    config = Path(script.flags.get("config-name", "")).stem
    if "megatron" in config:
        defaults |= {"actor_rollout_ref.actor.strategy": "megatron"}
    if is_sft and (ranks := script.flags.get("nproc-per-node", "")).isdigit():
        defaults["trainer.n_gpus_per_node"] = int(ranks)
    values = {key: _resolve(value, key, values, defaults) for key, value in values.items()}
    defaults = {key: _resolve(value, key, values, defaults) for key, value in defaults.items()}
    kind = "sft" if is_sft else ("ppo" if values.get("algorithm.adv_estimator", "gae") == "gae" else "grpo")
    recipe = LibraryRecipe(kind, values, origins, defaults, "verl")
    if config and config not in OWN_CONFIGS:
        fix = "Run it once with --cfg job, and translate what that prints; or copy the file's keys into the command."
        recipe.note("--config-name", Effect.REFUSED, f"the script starts from its own file, {config}", fix)
    if script.has_conditions:
        text = "the script has conditions or loops, and its assignments were read one after another"
        recipe.note(path.name, Effect.CHANGED, text)
    for name, key in script.unassigned.items():
        recipe.note(key, Effect.RENAMED, f"the script does not assign {name}: it stays as ${{oc.env:{name}}}")
    if problems := _find_wrong_numbers(values, defaults, recipe):
        raise ConfigError(problems)
    apply_table(recipe, VERL_SFT_KEYS if is_sft else VERL_PPO_KEYS)
    if is_sft:
        recipe.set("data.add_eos", True)
    return recipe.finish(values, (path,))


def _find_wrong_numbers(values: Mapping[str, Any], defaults: Mapping[str, Any], recipe: LibraryRecipe) -> list[Problem]:
    """A number with which the translation calculates has to be one, not a shell variable that nothing assigns."""
    return [
        Problem(
            key, f"found {value!r}; it must be a number", f"Write it in the file in the place of {value}.", recipe.origin_of(key)
        )
        for key, value in values.items()
        if isinstance(defaults.get(key), int | float) and not isinstance(defaults[key], bool) and isinstance(value, str)
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name != "_target_":  # a class of verl's
            flat |= _flatten(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat


def _parse(text: str) -> Any:
    try:
        value = yaml_text.parse_value(text)
    except yaml_text.YamlError:
        return text
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text
    return value


def _resolve(value: Any, key: str, values: Mapping[str, Any], defaults: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with references to other keys; ``${oc.env:NAME}`` stays for Strop to read."""
    if isinstance(value, list):
        return [_resolve(inner, key, values, defaults, depth) for inner in value]
    if isinstance(value, str) and value.startswith("~/"):
        value = "${oc.env:HOME}" + value[1:]
    if not isinstance(value, str) or "${" not in value or depth > MOST_REFERENCES:
        return value

    def find(match: re.Match[str]) -> Any:
        target = match["key"]
        dots = len(target) - len(target.lstrip("."))
        around = key.split(".")[:-dots] if dots else []
        target = ".".join([*around, target.lstrip(".")])
        default = _parse(match["default"].strip()) if match["default"] is not None else None
        found = values[target] if target in values else defaults.get(target, default)
        return _resolve(found, target, values, defaults, depth + 1)

    whole = REFERENCE.fullmatch(value.strip())
    if whole is not None:
        return find(whole)
    return REFERENCE.sub(lambda match: str(find(match)), value)


FORMAT = RecipeFormat("verl", is_verl, read_verl, (".yaml", ".yml", ".sh"))
