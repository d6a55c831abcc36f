"""Every key of the schema is read by some code, or says that it has no effect."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from strop import packages
from strop.base_config import BaseConfig, fields_of, followed_keys, option_set_by, section_model
from strop.config import EvalRunConfig, GrpoRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.keys import entry_model
from support.source_trees import children, dotted, parse_package, without_collecting

CHECKS = re.compile(
    r"(_?(check|warn|refuse|require)_|errors$|warnings$|\w+_(errors|warnings)$)"
)  # they read keys without using them

# Keys that change nothing, with a value that says so.
WITHOUT_EFFECT = {
    "policy.generation_batch_size": "8",
    "policy.dtensor_cfg.lora_cfg.use_triton": "false",
    "policy.generation.vllm_cfg.async_engine": "false",
    "sft.val_micro_batch_size": "2",
    "dpo.val_micro_batch_size": "2",
    "rm.val_micro_batch_size": "2",
}
# Keys whose only value that is accepted is what happens, or that their section refuses by itself.
ONE_VALUE = {
    "RewardModelConfig.enabled",
    "DynamicBatchingConfig.enabled",
    "LoraConfig.match_all_linear",
    "VllmConfig.logprobs_mode",
}


@cache
def sections() -> dict[str, type[BaseConfig]]:
    """Every section of every kind of run, by the name of its class."""
    found: dict[str, type[BaseConfig]] = {}

    def visit(model: type[BaseConfig]) -> None:
        if model.__name__ not in found:
            found[model.__name__] = model
            for field in fields_of(model).values():
                if (inner := section_model(field) or entry_model(field)) is not None:
                    visit(inner)

    for root in (*TRAINING_RUNS.values(), EvalRunConfig):
        visit(root)
    return found


@cache
def declaring(name: str) -> frozenset[str]:
    """The classes that declare a key of this name; one for a hierarchy."""
    classes = [model for model in sections().values() if name in fields_of(model)]
    return frozenset(
        next(base.__name__ for base in reversed(each.__mro__) if name in vars(base).get("__annotations__", {}))
        for each in classes
    )


def is_own_key(name: str) -> bool:
    field = next(fields_of(model)[name] for model in sections().values() if name in fields_of(model))
    return not (field.exclude or option_set_by(field) or section_model(field) or entry_model(field))


@cache
def reads() -> dict[str, set[str]]:
    """Name of a key -> the expressions that it is read of, such as ``generation`` or ``self.config``, by code that is not a check."""
    found: dict[str, set[str]] = defaultdict(set)
    with without_collecting():
        for path, tree in parse_package().items():
            if "recipes" not in path.parts:
                _collect(tree, found)
    return found


def _collect(node: ast.AST, found: dict[str, set[str]]) -> None:
    for child in children(node):
        if isinstance(child, ast.FunctionDef) and CHECKS.match(child.name):
            continue
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            found[child.attr].add(dotted(child.value)[-60:])
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Name)
            and child.func.id == "getattr"
            and len(child.args) > 1
        ):
            for name in _names(child.args[1]):
                found[name].add("getattr")
        _collect(child, found)


def _names(expression: ast.expr) -> Iterator[str]:
    """The keys that ``getattr`` may be given: a constant, or every key that fits an f-string."""
    if isinstance(expression, ast.Constant):
        yield str(expression.value)
    elif isinstance(expression, ast.JoinedStr):
        pattern = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+" for part in expression.values)
        yield from {name for model in sections().values() for name in fields_of(model) if re.fullmatch(pattern, name)}


@cache
def defaults_of_others() -> frozenset[str]:
    """Names of keys that others follow: they set those."""
    targets = (target for model in sections().values() for field in fields_of(model).values() for target in followed_keys(field))
    return frozenset(target.rpartition(".")[2] for target in targets)


def unread_keys() -> Iterator[str]:
    accepted = {key.rpartition(".")[2] for key in WITHOUT_EFFECT}
    for name in sorted({name for model in sections().values() for name in fields_of(model)}):
        if not is_own_key(name) or name in accepted or name in defaults_of_others() or reads().get(name):
            continue
        yield from (f"{owner}.{name}" for owner in declaring(name) if f"{owner}.{name}" not in ONE_VALUE)


def test_a_key_that_no_code_reads_is_not_in_the_schema() -> None:
    unread = [key for key in unread_keys() if not key.startswith(("Megatron", "Fp8Config"))]
    assert not unread, f"no code reads {', '.join(unread)}: read it, refuse it, or enter it in WITHOUT_EFFECT with a warning"


# ``enabled`` is in many sections: the expression that each is read of. "section" is ``config.watchdog``, "self" ``saving_enabled``.
ASKED = {
    "CheckpointingConfig": "self",
    "EmaConfig": "ema",
    "LoraConfig": "config.dtensor_cfg.lora_cfg",
    "SequencePackingConfig": "self.sequence_packing",
    "ColocatedConfig": "generation.colocated",
    "WatchdogConfig": "section",
    "TrackerConfig": "section",
    "MonitorConfig": "section",
    "RewardScalingConfig": "scaling",
    "RewardShapingConfig": "shaping",
    "AsyncConfig": "self.async_config",
    "RouterReplayConfig": "config.policy.router_replay",
    "Float8Config": "config",
    "DraftConfig": "self",
}
REFUSED_OFF_OR_ON = {"DtensorConfig", "MegatronConfig", "MegatronPeftConfig", "Fp8Config"}  # by a rule about the model


def test_every_section_that_can_be_turned_off_is_asked_whether_it_is_on() -> None:
    for name in declaring("enabled") - REFUSED_OFF_OR_ON:
        assert f"{name}.enabled" in ONE_VALUE or ASKED[name] in reads()["enabled"], f"nothing asks for {name}.enabled"


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_without_effect_says_so(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    section = key.partition(".")[0]
    kind: Any = TRAINING_RUNS.get(section, GrpoRunConfig)
    base = ["policy.model_name=m", "data.train.dataset_name=squad"]
    base += ["policy.dtensor_cfg.lora_cfg.enabled=true"] if "lora" in key else []
    base += ["policy.generation.backend=vllm", "env.math={}"] if kind is GrpoRunConfig else []
    said = [str(problem) for problem in load_config(None, [*base, f"{key}={WITHOUT_EFFECT[key]}"], root=kind).warnings]
    assert any(key in warning and "has no effect" in warning.replace("it has", "has") for warning in said), said
