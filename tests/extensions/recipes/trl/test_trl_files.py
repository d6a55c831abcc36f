"""Files of TRL in Strop's keys: every argument is in the tables, and what they compute is what TRL computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError
from strop.config.load.load import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.library_recipe import find_entry
from strop.extensions.recipes.translated_recipe import TranslatedRecipe, render_recipe, translate_recipe
from strop.extensions.recipes.trl.trl_format import COMMON, SCRIPT, TRAINERS
from strop.extensions.recipes.trl.trl_keys import TRL_KEYS
from strop.learner.torch.schedules import make_schedule

BASE = "model_name_or_path: m\noutput_dir: out\ndataset_name: owner/name\n"
RLOO = f"{BASE}reward_funcs: [accuracy_reward]\nnum_generations: 4\n"
GRPO = f"{RLOO}scale_rewards: group\n"
Translate = Callable[..., TranslatedRecipe]


@pytest.fixture
def translate(tmp_path: Path) -> Translate:
    def run(text: str, *, command: str | None = None, gpus: int | None = None) -> TranslatedRecipe:
        path = tmp_path / "trl.yaml"
        path.write_text(text)
        return translate_recipe(path, (), f"trl-{command}" if command else "auto", gpus=gpus)

    return run


def reasons(translate: Translate, text: str, command: str | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        translate(text, command=command)
    return {problem.key: problem.message for problem in caught.value.problems}


@pytest.fixture(scope="module")
def trainers() -> dict[str, Any]:
    trl = pytest.importorskip("trl")
    names = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
    return {command: getattr(trl, f"{name}Config") for command, name in names.items()}


def default_of(field: dataclasses.Field[Any]) -> Any:
    made = field.default if field.default is not dataclasses.MISSING else None
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else made
    return getattr(made, "value", made)


@pytest.mark.parametrize("command", [command for command in TRL_KEYS if command != "online_dpo"])
def test_every_argument_of_a_trainer_is_in_the_table_with_its_default(command: str, trainers: dict[str, Any]) -> None:
    compare_with_table(command, trainers[command])


def compare_with_table(command: str, kind: Any) -> None:
    fields = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    assert [name for name in fields if find_entry(TRL_KEYS[command], name) is None] == []
    assert fields == {**COMMON, **TRAINERS[command]}


def test_every_argument_of_the_commands_is_in_the_table_with_its_default(trainers: dict[str, Any]) -> None:
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    fields = {
        field.name: default_of(field)
        for kind in (trl.ModelConfig, GRPOScriptArguments, trl.DatasetMixtureConfig)
        for field in dataclasses.fields(kind)
    }
    assert fields == SCRIPT
    assert [name for name in fields if find_entry(TRL_KEYS["grpo"], name) is None] == []


def test_a_dump_of_each_config_is_recognised_and_translated(trainers: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["policy.model_name=m"]
    for command, kind in trainers.items():
        path = tmp_path / f"{command}.json"
        path.write_text(json.dumps(kind(output_dir="out", bf16=False, per_device_train_batch_size=8).to_dict()))
        rewards = [] if command not in ("grpo", "rloo") else ["env.math.verifier=exact"]
        found = translate_recipe(path, [*overrides, *rewards, "data.train.dataset_name=owner/name"])
        assert found.kind == {"rloo": "grpo", "kto": "dpo", "reward": "rm"}.get(command, command)
        assert found.loaded.config.policy.precision == "float32"


def test_the_translation_loads_back_without_differences(translate: Translate, tmp_path: Path) -> None:
    text = f"{GRPO}use_vllm: true\nuse_peft: true\nlora_target_modules: [q_proj]\nmax_steps: 50\neval_strategy: steps\neval_steps: 5\n"
    found = translate(text)
    mine = tmp_path / "mine.yaml"
    mine.write_text(render_recipe(found, "test"))
    loaded = load_config(mine, root=TRAINING_RUNS["grpo"])
    assert loaded.config == found.loaded.config and not loaded.differences


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({}, 1, (2, 8, 1)),  # 8 completions of a device: 2 prompts, one optimizer step
        ({"gradient_accumulation_steps": 4}, 2, (16, 64, 1)),
        ({"steps_per_generation": 4}, 1, (8, 8, 1)),  # 4 optimizer steps of a batch
        ({"generation_batch_size": 64, "num_iterations": 2}, 2, (16, 16, 2)),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, 1, (4, 16, 1)),  # sampled twice with the same weights
    ],
)
def test_batches_count_devices_accumulation_and_generations(
    translate: Translate, options: dict[str, int], gpus: int, expected: tuple[int, int, int]
) -> None:
    config = translate(GRPO + "".join(f"{key}: {value}\n" for key, value in options.items()), gpus=gpus).loaded.config
    assert (config.grpo.num_prompts_per_step, config.policy.train_global_batch_size, config.grpo.update_epochs) == expected
    assert config.cluster.gpus_per_node == gpus


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-8}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "min_lr_ratio": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 10])
def test_the_learning_rate_is_that_of_transformers_at_each_step(
    translate: Translate, name: str, options: dict[str, Any], warmup: int
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    kwargs = f"lr_scheduler_kwargs: {json.dumps(options)}\n" if options else ""
    text = f"{BASE}max_steps: 100\nlr_scheduler_type: {name}\nwarmup_steps: {warmup}\nlearning_rate: 1.0e-5\n{kwargs}"
    scheduler = translate(text, command="sft").loaded.source.values["policy"]["scheduler"]
    ours = make_schedule(scheduler["name"], scheduler["kwargs"], total_steps=100)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    theirs = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=100, scheduler_specific_kwargs=options
    )
    for step in range(100):
        assert 1e-5 * ours.ratio(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-14), step
        optimizer.step()
        theirs.step()


def test_schedules_step_with_the_optimizer_and_weight_decay_spares_norms(translate: Translate) -> None:
    config = translate(f"{GRPO}weight_decay: 0.1\nadam_beta2: 0.95\n").loaded.config
    assert config.policy.scheduler_unit == "optimizer_step" and not config.policy.optimizer.decay_vectors
    assert config.policy.optimizer.kwargs == {"lr": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}


@pytest.mark.parametrize(
    ("loss", "objective", "aggregation"),
    [
        ("grpo", "clip", "sequence_mean"),
        ("dapo", "clip", "token_mean"),
        ("bnpo", "clip", "token_mean"),
        ("dr_grpo", "clip", "constant_length"),
        ("cispo", "cispo", "token_mean"),
        ("sapo", "soft_gate", "sequence_mean"),
        ("vespo", "gamma_weight", "token_mean"),
        ("luspo", "sequence_clip", "sequence_sum"),
    ],
)
def test_a_loss_type_is_an_objective_and_a_reduction(translate: Translate, loss: str, objective: str, aggregation: str) -> None:
    level = "sequence" if loss == "luspo" else "token"
    config = translate(f"{GRPO}loss_type: {loss}\nimportance_sampling_level: {level}\nepsilon_high: 5.0\n").loaded.config
    values = translate(f"{GRPO}loss_type: {loss}\nimportance_sampling_level: {level}\nepsilon_high: 5.0\n").loaded.source.values
    assert values["algorithm"]["objective"]["name"] == objective and config.loss_fn.aggregation == aggregation
    assert loss != "cispo" or values["algorithm"]["objective"]["high"] == 4.0  # the largest weight is 5 in both
    assert loss != "dr_grpo" or config.loss_fn.constant_length == config.policy.generation.max_new_tokens


def test_advantages_kl_and_the_correction_of_vllm_are_those_of_trl(translate: Translate) -> None:
    algorithm = translate(f"{GRPO}use_vllm: true\nbeta: 0.04\ndelta: 4.0\n").loaded.source.values["algorithm"]
    assert algorithm["advantage"] == {"name": "group_relative", "normalize": True, "deviation": "unbiased"}
    assert algorithm["corrections"] == [{"name": "mis", "low": 0.0, "high": 3.0, "level": "sequence"}]
    assert algorithm["kl"] == {"unbiased": True} and algorithm["objective"]["two_sided"] == 4.0
    text = f"{GRPO}use_vllm: true\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_clip_max: 2.0\n"
    algorithm = translate(text.replace("scale_rewards: group", "scale_rewards: batch")).loaded.source.values["algorithm"]
    assert algorithm["corrections"] == [{"name": "tis", "cap": 2.0, "floor": 0.0, "level": "token"}]
    assert algorithm["advantage"] == {"name": "batch_scaled"}


@pytest.mark.parametrize(("loss", "name"), [("sigmoid", "dpo"), ("ipo", "ipo"), ("hinge", "slic"), ("robust", "robust_dpo")])
def test_a_preference_loss_has_its_algorithm_and_beta(translate: Translate, loss: str, name: str) -> None:
    found = translate(
        f"{BASE}loss_type: [{loss}, sft]\nloss_weights: [0.8, 0.2]\nbeta: 0.2\nlabel_smoothing: 0.0\n", command="dpo"
    )
    config = found.loaded.config
    assert config.algorithm.name == name and config.dpo.reference_policy_kl_penalty == 0.2
    assert (config.dpo.preference_loss_weight, config.dpo.sft_loss_weight) == (0.8, 0.2)


def test_rloo_charges_the_kl_to_the_reward_and_trains_once_on_a_batch(translate: Translate) -> None:
    values = translate(f"{RLOO}reward_clip_range: [-1.0, 1.0]\n", command="rloo").loaded.source.values
    assert values["algorithm"]["name"] == "rloo" and values["grpo"]["reward_scaling"]["source_min"] == -1.0
    assert values["loss_fn"] == {"reference_policy_kl_penalty": 0.05, "reference_policy_kl_type": "k1", "use_kl_in_reward": True}
    assert "a product over its tokens" in reasons(translate, f"{RLOO}num_iterations: 2\n", "rloo")["num_iterations"]


def test_online_dpo_kto_and_reward_models_have_their_runs(translate: Translate) -> None:
    online = translate(f"{BASE}reward_model_path: rm\nbeta: 0.2\n", command="online_dpo").loaded.config
    assert (online.algorithm.name, online.grpo.num_generations_per_prompt) == ("online_dpo", 2)
    assert translate(f"{BASE}desirable_weight: 2.0\n", command="kto").loaded.config.algorithm.name == "kto"
    assert translate(f"{BASE}center_rewards_coefficient: 0.01\n", command="reward").loaded.config.rm.centering == 0.01


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("load_in_4bit: true", "load_in_4bit"),
        ("sync_ref_model: true", "sync_ref_model"),
        ("fp16: true", "fp16"),
        ("neftune_noise_alpha: 5", "neftune_noise_alpha"),
        ("use_vllm: true\nvllm_mode: server", "vllm_mode"),
        ("num_train_epochs: 0.5", "num_train_epochs"),
        ("optim: adafactor", "optim"),
        ("lr_scheduler_type: reduce_lr_on_plateau", "lr_scheduler_type"),
        ("gradient_accumulation_steps: 2\nsteps_per_generation: 3", "steps_per_generation"),
        ("per_device_train_batch_size: 6", "num_generations"),
        ("num_generation: 4", "num_generation"),
        ("parallelism_config: {cp_size: 2}", "parallelism_config"),
    ],
)
def test_what_cannot_run_is_refused_at_the_key_that_asks_for_it(translate: Translate, line: str, key: str) -> None:
    text = GRPO + line + "\n"
    assert list(reasons(translate, text, "grpo")) == [key]


def test_a_pickle_of_arguments_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "training_args.bin"
    path.write_bytes(b"\x80\x04")
    with pytest.raises(ConfigError, match="a pickle, which may run code") as caught:
        translate_recipe(path)
    assert "json.dump(args.to_dict(), file)" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("section", "written", "hint"),
    [
        ("grpo", "max_steps=20", "TRL's max_steps: grpo.max_num_steps=20 here, 20 optimizer steps."),
        ("grpo", "num_generations=4", "TRL's num_generations: grpo.num_generations_per_prompt=4 here."),
        ("grpo", "grpo.beta=0.04", "TRL's beta: loss_fn.reference_policy_kl_penalty=0.04 here."),
        ("grpo", "beta=0.04", "TRL's beta: loss_fn.reference_policy_kl_penalty=0.04 here."),
        ("dpo", "dpo.beta=0.2", "TRL's beta: dpo.reference_policy_kl_penalty=0.2 here."),
        ("grpo", "max_completion_length=64", "TRL's max_completion_length: policy.generation.max_new_tokens=64 here."),
        ("grpo", "grpo.scale_rewards=false", "algorithm.advantage.name=group_relative here, with normalize=false."),
        ("grpo", "gradient_accumulation_steps=2",
         "policy.train_global_batch_size=16 here. That is with TRL's defaults for the rest."),
        ("grpo", "per_device_train_batch_size=4", "Look at policy.train_global_batch_size and policy.train_micro_batch_size."),
        ("sft", "max_length=512", "TRL's max_length: policy.max_total_sequence_length=512 here"),
        ("sft", "logging_steps=1", "TRL's logging_steps: every step is logged"),
        ("rm", "rm.center_rewards_coefficient=0.01", "TRL's center_rewards_coefficient: rm.centering=0.01 here."),
        ("grpo", "vllm_mode=colocate", "TRL's vllm_mode: it has its default there, for which nothing is set here."),
        ("grpo", "max_steps=often", "It is an argument of TRL's; `strop translate` says what becomes of it in a file."),
        ("grpo", "policy.generation.max_completion_length=64", "The keys of policy.generation are"),
        ("ppo", "scale_rewards=false", "The sections are"),
    ],
)  # fmt: skip
def test_a_word_of_trl_is_told_what_it_is_here(section: str, written: str, hint: str) -> None:
    given = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*(given if section in ("grpo", "ppo") else given[:1]), written], root=TRAINING_RUNS[section])
    (problem,) = [each for each in refused.value.problems if each.key == written.partition("=")[0]]
    assert hint in problem.fix and problem.message == "there is no such key"
