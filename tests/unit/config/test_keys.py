"""Keys that are wrong, gone or without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from strop import base_config, plugins
from strop.base_config import BaseConfig, fields_of, iter_sections, to_tree, validate_section
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.load.load import REMOVED_KEYS, RemovedKey
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.keys import find_field, find_nearest_keys, is_misspelling, role_of, suggest_keys
from strop.problems import Problem
from support.overrides import RUN

MEANT = {
    "grpo.num_promts_per_step": "grpo.num_prompts_per_step",
    "grpo.num_prompt_per_step": "grpo.num_prompts_per_step",
    "grpo.numPromptsPerStep": "grpo.num_prompts_per_step",
    "grpo.num_prompts": "grpo.num_prompts_per_step",
    "grpo.num_generations": "grpo.num_generations_per_prompt",
    "grpo.max_steps": "grpo.max_num_steps",
    "grpo.max_step": "grpo.max_num_steps",
    "grpo.sed": "grpo.seed",
    "grpo.val_perid": "grpo.val_period",
    "grpo.max_new_tokens": "policy.generation.max_new_tokens",
    "grpo.learning_rate": "policy.optimizer.kwargs.lr",
    "grpo.policy": "policy",
    "loss_fn.lr": "policy.optimizer.kwargs.lr",
    "loss_fn.ratio_clp_min": "loss_fn.ratio_clip_min",
    "loss_fn.ratio_clip_mni": "loss_fn.ratio_clip_min",
    "policy.temperature": "policy.generation.temperature",
    "policy.modelname": "policy.model_name",
    "policy.Precision": "policy.precision",
    "policy.optimzer": "policy.optimizer",
    "policy.lora": "policy.dtensor_cfg.lora_cfg",
    "policy.max_grad_nrom": "policy.max_grad_norm",
    "policy.generation.topk": "policy.generation.top_k",
    "policy.generation.temprature": "policy.generation.temperature",
    "policy.dtensor_cfg.tensor_parallel": "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.tensor_paralel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "checkpointing.save_perod": "checkpointing.save_period",
    "data.train.datset_name": "data.train.dataset_name",
    "data.dataset_name": "data.train.dataset_name",
    "cluster.gpu_per_node": "cluster.gpus_per_node",
    "val_period": "grpo.val_period",
    "polcy": "policy",
    "tokenizer": "policy.tokenizer",
}
NOTHING = [  # keys of recipes that Strop does not have, and one of no library
    "policy.generation.expose_http_server",
    "policy.generation.vllm_cfg.reasoning_parser_plugin",
    "policy.generation.real_quant",
    "policy.generation.vllm_cfg.is_mx",
    "policy.generation.bad_words",
    "policy.fuse_loss",
    "policy.sequence_packing.algorithm",
    "data.train.data_files",
    "data.train.max_samples",
    "checkpointing.ft_save_period",
    "checkpointing.ft_keep_latest_k",
    "grpo.use_best_at_k",
    "grpo.combined_training_weight",
    "loss_fn.xtoken_loss",
    "cluster.segment_size",
    "logger.clearml",
    "async_rl",
    "xyzzy",
]


@pytest.mark.parametrize(("key", "meant"), MEANT.items())
def test_a_wrong_key_is_answered_with_the_one_that_was_meant(key: str, meant: str) -> None:
    assert find_nearest_keys(key.split("."), TRAINING_RUNS["grpo"])[:1] == (meant,)


@pytest.mark.parametrize("key", NOTHING)
def test_a_key_that_is_like_none_is_answered_with_no_hint_but_the_keys_of_its_section(key: str) -> None:
    path, root = key.split("."), TRAINING_RUNS["grpo"]
    section = ".".join(path[:-1])
    assert find_nearest_keys(path, root) == ()
    assert suggest_keys(path, root).startswith(f"The keys of {section} are " if section else "The sections are algorithm, ")


def test_the_keys_of_a_large_section_are_cut_short() -> None:
    said = suggest_keys(("grpo", "xyzzy"), TRAINING_RUNS["grpo"])
    assert "more, which `strop config` lists" in said and len(said) < 500


@pytest.mark.parametrize(
    ("name", "other", "close"),
    [
        ("top_k", "topk", True),
        ("weigth", "weight", True),
        ("top_k", "top_p", False),
        ("val_period", "save_period", False),
        ("min_ratio", "max_ratio", False),
        ("ft_save_period", "save_period", False),
    ],
)
def test_names_are_compared_word_by_word(name: str, other: str, close: bool) -> None:
    assert is_misspelling(name, other) is close


def key_of(removed: RemovedKey) -> str:
    return removed.pattern.replace("*.async_*", "grpo.async_grpo").replace("*.", "policy.generation.vllm_cfg.")


@pytest.mark.parametrize("removed", REMOVED_KEYS, ids=lambda removed: removed.pattern)
def test_a_key_that_is_gone_is_refused_with_what_to_do_instead(removed: RemovedKey, tmp_path: Path) -> None:
    key, asked = key_of(removed), f"{key_of(removed)}=7"
    assert find_field(GrpoRunConfig, tuple(key.split("."))) is None, "the schema has it again"
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, asked], root=GrpoRunConfig)
    (problem,) = caught.value.problems
    assert (problem.key, problem.message, problem.fix) == (key, "found 7, and this key is gone", removed.instead)
    unset = f"{key}={json.dumps(removed.default)}"  # as the config.yaml of a run that did not set it
    assert load_config(None, [*RUN, unset], root=GrpoRunConfig).config == load_config(None, RUN, root=GrpoRunConfig).config
    load_config(None, [*RUN, asked], root=GrpoRunConfig, check=False)  # a saved run is read, whatever it asked for


def test_a_key_that_is_gone_is_refused_at_its_line_beside_other_problems(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("grpo:\n  max_num_stepz: 3\n  async_grpo:\n    enabled: true\n    repeatable: true\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, RUN, root=GrpoRunConfig)
    lines = {problem.key: getattr(problem.origin, "line", None) for problem in caught.value.problems}
    assert lines == {"grpo.max_num_stepz": 2, "grpo.async_grpo.repeatable": 5}


P = "policy.sequence_packing."


def warnings(*overrides: str) -> list[tuple[str, str]]:
    return [(problem.key, problem.message) for problem in load_config(None, [*RUN, *overrides], root=GrpoRunConfig).warnings]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.train_micro_batch_size=8"], []),
        ([f"{P}train_mb_tokens=4096", f"{P}logprob_mb_tokens=8192"], []),
        (["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=2048"], []),  # it still sets the budget without gradients
        (["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=4096"], []),  # the same number twice
        (
            ["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=2048", f"{P}logprob_mb_tokens=2048"],
            ["policy.train_micro_batch_size"],
        ),
        (["policy.logprob_batch_size=2", f"{P}logprob_mb_tokens=8192"], ["policy.logprob_batch_size"]),
        (["policy.dynamic_batching.train_mb_tokens=9999"], ["policy.dynamic_batching.train_mb_tokens"]),
        ([f"{P}train_mb_tokens=9999", "policy.dynamic_batching.train_mb_tokens=9999"], []),
        ([f"{P}enabled=false", f"{P}logprob_mb_tokens=9999"], [f"{P}logprob_mb_tokens"]),
    ],
)
def test_batch_sizes_beside_budgets_in_tokens(overrides: list[str], keys: list[str]) -> None:
    found = warnings(*overrides)
    assert [key for key, _ in found] == keys
    assert all("has no effect" in message and "mb_tokens = " in message for _, message in found)


@pytest.mark.parametrize(
    ("override", "off"),
    [
        ("policy.dtensor_cfg.lora_cfg.dim=16", "policy.dtensor_cfg.lora_cfg.enabled"),
        ("policy.ema.decay=0.5", "policy.ema.enabled"),
        ("grpo.reward_shaping.overlong_buffer_length=64", "grpo.reward_shaping.enabled"),
    ],
)
def test_keys_of_a_section_that_is_off(override: str, off: str) -> None:
    (found,) = warnings(override)
    assert found == (override.partition("=")[0], f"{override.partition('=')[0]} has no effect: {off} is false")


@pytest.mark.extensions
@pytest.mark.parametrize("section", ["sft", "dpo", "rm"])
def test_the_micro_batch_of_validation_names_what_cuts_it(section: str) -> None:
    kind: Any = TRAINING_RUNS[section]
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "data.validation.dataset_name=squad"]
    (problem,) = load_config(None, [*base, f"{section}.val_micro_batch_size=4"], root=kind).warnings
    assert (
        problem.key == f"{section}.val_micro_batch_size" and "policy.sequence_packing.logprob_mb_tokens = 2048" in problem.message
    )


@pytest.mark.extensions
def test_a_reward_model_that_is_turned_off_is_refused() -> None:
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "rm.val_period=0"]
    with pytest.raises(ConfigError, match=r"reward_model_cfg\.enabled: found false, but strop rm trains"):
        load_config(None, [*base, "policy.reward_model_cfg.enabled=false"], root=TRAINING_RUNS["rm"])


# --- Keys and sections that extensions attach to those of the core ------------------------------------------------------------


class Strength(BaseConfig):
    """Keys of an extension."""

    identity_keys = ("strength",)

    strength: float = 0.0

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        if self.strength > getattr(self, "limit", 0.0):
            yield Problem(f"{key}.strength", "it is too large")


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> type[BaseConfig]:
    attached = {("keys", "Owner"): {"strength": Strength}}
    monkeypatch.setattr(base_config, "_attached", lambda group, name: attached.get((group, name), {}))

    class Owner(BaseConfig):
        """A section of the core."""

        limit: float = 1.0

        def errors(self, key: str) -> Iterator[Problem]:
            yield from super().errors(key)
            yield Problem(f"{key}.limit", "of the owner")

    return Owner


def test_they_are_keys_of_the_owner_and_of_what_inherits_from_it(owner: type[BaseConfig]) -> None:
    class Heir(owner):  # type: ignore[misc, valid-type]
        more: int = 2

    assert set(fields_of(owner)) == {"limit", "strength"}
    heir = validate_section(Heir, {"strength": 0.5, "more": 3})
    assert to_tree(heir) == {"limit": 1.0, "strength": 0.5, "more": 3}
    with pytest.raises(ValueError, match="strength"):
        validate_section(owner, {"strength": "much"})


def test_they_see_the_owners_keys_and_are_checked_with_them(owner: type[BaseConfig]) -> None:
    section = validate_section(owner, {"strength": 2.0})
    assert Strength.of(section) is section and [each for _, each in iter_sections(section)] == [section]
    assert [problem.key for problem in section.errors("a")] == ["a.strength", "a.limit"]
    assert [problem.key for problem in validate_section(owner, {"strength": 1.0}).errors("a")] == ["a.limit"]


def test_they_say_what_a_change_means_to_a_run_that_is_continued(owner: type[BaseConfig]) -> None:
    assert role_of(owner, ["strength"]) == "identity" and role_of(owner, ["limit"]) == "applied"


def test_a_section_without_them_says_so() -> None:
    class Other(BaseConfig):
        limit: float = 1.0

    with pytest.raises(LookupError, match="Other has no section Strength"):
        Strength.of(Other())


class Added(BaseConfig):
    added: int = 3

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield Problem(f"{key}.added", "found 3", "Set it to 4.")


class Replacing(Added):
    def _check_size(self) -> str:
        return "theirs"


class Owner(BaseConfig):
    size: int = 1

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        yield Problem(f"{key}.size", self._check_size(), "Set it to 2.")

    def _check_size(self) -> str:
        return "ours"


def attach(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    point = EntryPoint("Whole.added", f"{__name__}:{kind.__name__}", "strop.keys")
    monkeypatch.setattr(plugins, "declared", lambda group: {"Whole.added": point} if group == "keys" else {})


def test_attached_keys_stand_among_those_of_the_section_and_are_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, Added)

    class Whole(Owner):
        pass

    whole = Whole(added=5, size=2)  # type: ignore[call-arg]
    assert Added.of(whole).added == 5
    assert [(problem.key, problem.message) for problem in whole.errors("a")] == [("a.size", "ours"), ("a.added", "found 3")]


def test_attached_keys_may_not_replace_a_check_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, Replacing)
    with pytest.raises(
        TypeError, match=r"Replacing is attached to Whole by strop\.keys, and its _check_size would replace that of Owner"
    ):
        type("Whole", (Owner,), {"__annotations__": {}})
