"""Scripts and configurations of verl in Strop's keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.config import ConfigError
from strop.config.load.load import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.library_recipe import find_format
from strop.extensions.recipes.rules import Effect
from strop.extensions.recipes.translated_recipe import TranslatedRecipe, render_recipe, translate_recipe
from strop.extensions.recipes.verl.verl_format import is_verl, read_script
from strop.learner.torch.schedules import make_schedule

SCRIPT = """#!/usr/bin/env bash
set -x
# algorithm.adv_estimator=gae is not what this does
max_response_length=$((1024 * 2))
MODEL=${MODEL:-"org/model"}
n=4
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/gsm8k/train.parquet \\
    data.val_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']" \\
    data.train_batch_size=64 \\
    data.max_prompt_length=512 \\
    data.max_response_length=${max_response_length} \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.name=vllm \\
    {EXTRA} \\
    trainer.n_gpus_per_node=8 $@
"""
Translate = Callable[..., TranslatedRecipe]


@pytest.fixture
def translate(tmp_path: Path) -> Translate:
    def run(*extra: str, text: str = SCRIPT, overrides: tuple[str, ...] = ()) -> TranslatedRecipe:
        path = tmp_path / "run.sh"
        path.write_text(text.replace("{EXTRA}", " ".join(extra)))
        return translate_recipe(path, overrides)

    return run


def refused(translate: Translate, *extra: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        translate(*extra)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_a_script_is_read_without_running_it(translate: Translate) -> None:
    config = translate().loaded.config
    assert config.policy.model_name == "org/model" and config.policy.generation.max_new_tokens == 2048
    assert [entry.dataset_name for entry in config.data.validation] == ["/data/gsm8k/test.parquet", "/data/math/test.parquet"]
    assert config.cluster.gpus_per_node == 8 and config.policy.max_total_sequence_length == 2560


def test_batches_count_completions_where_verl_counts_prompts(translate: Translate) -> None:
    config = translate("actor_rollout_ref.actor.ppo_epochs=2").loaded.config
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (64, 4)
    assert config.policy.train_global_batch_size == 16 * 4 and config.grpo.update_epochs == 2


def test_what_verl_does_by_default_is_written_down(translate: Translate) -> None:
    found = translate()
    config, values = found.loaded.config, found.loaded.source.values
    assert values["algorithm"]["objective"] == {"name": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}
    assert values["algorithm"]["advantage"] == {"name": "group_relative", "normalize": True, "deviation": "unbiased"}
    assert config.loss_fn.aggregation == "token_mean" and config.loss_fn.reference_policy_kl_penalty == 0
    assert config.policy.generation.vllm_cfg.tensor_parallel_size == 2 and config.policy.generation.val_temperature == 0
    assert config.grpo.max_num_epochs == 30 and config.grpo.val_period == 0 and config.grpo.val_at_start
    assert not config.checkpointing.enabled and config.policy.dtensor_cfg.activation_checkpointing
    assert config.policy.optimizer.kwargs == {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}


def test_the_translation_loads_back_without_differences(translate: Translate, tmp_path: Path) -> None:
    found = translate("actor_rollout_ref.actor.use_kl_loss=True", "trainer.save_freq=10", "actor_rollout_ref.model.lora_rank=16")
    mine = tmp_path / "mine.yaml"
    mine.write_text(render_recipe(found, "test"))
    loaded = load_config(mine, root=TRAINING_RUNS["grpo"], check=False)
    assert loaded.source.values == found.loaded.source.values and not loaded.differences


@pytest.mark.parametrize(
    ("mode", "name", "aggregation"),
    [
        ("vanilla", "clip", "token_mean"),
        ("gspo", "sequence_clip", "sequence_mean"),
        ("sapo", "soft_gate", "sequence_mean"),
        ("geo_mean", "geometric_mean", "sequence_mean"),
        ("gpg", "reinforce", "token_mean"),
        ("clip_cov", "covariance_clip", "token_mean"),
        ("kl_cov", "covariance_kl", "token_mean"),
        ("cispo", "cispo", "token_mean"),
    ],
)
def test_a_policy_loss_is_an_objective_and_a_reduction(translate: Translate, mode: str, name: str, aggregation: str) -> None:
    loaded = translate(f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}").loaded
    assert loaded.source.values["algorithm"]["objective"]["name"] == name and loaded.config.loss_fn.aggregation == aggregation


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        ("rloo", "leave_one_out"),
        ("reinforce_plus_plus", "batch_whitened"),
        ("reinforce_plus_plus_baseline", "batch_whitened"),
        ("remax", "greedy_baseline"),
        ("opo", "length_weighted"),
        ("gpg", "group_relative"),
    ],
)
def test_an_estimator_is_an_advantage(translate: Translate, estimator: str, name: str) -> None:
    text = SCRIPT.replace("adv_estimator=grpo", f"adv_estimator={estimator}")
    assert translate(text=text).loaded.source.values["algorithm"]["advantage"]["name"] == name


@pytest.mark.parametrize(("asked", "ours"), [("kl", "k1"), ("low_var_kl", "k3"), ("k2", "k2"), ("k3+", "k2")])
def test_a_kl_term_in_the_loss_has_its_estimator(translate: Translate, asked: str, ours: str) -> None:
    kl = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01")
    found = translate(*kl, f"actor_rollout_ref.actor.kl_loss_type={asked}")
    loss = found.loaded.config.loss_fn
    assert (loss.reference_policy_kl_penalty, loss.reference_policy_kl_type) == (0.01, ours)
    assert any(
        difference.key.endswith("kl_loss_type") and difference.effect is Effect.CHANGED for difference in found.differences
    ) == (asked == "k3+")


def test_a_kl_term_in_the_reward_can_adapt(translate: Translate) -> None:
    values = translate(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"
    ).loaded.source.values
    assert values["algorithm"]["kl"] == {"place": "reward", "target": 0.2, "horizon": 10000}
    assert values["loss_fn"]["reference_policy_kl_type"] == "k1"
    both = refused(translate, "algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=True")
    assert list(both) == ["algorithm.use_kl_in_reward"]


def test_gae_is_ppo_with_a_critic(translate: Translate) -> None:
    text = SCRIPT.replace("adv_estimator=grpo", "adv_estimator=gae")
    found = translate(
        "critic.optim.lr=2e-5", "critic.model.path=org/critic", "trainer.critic_warmup=5", "algorithm.lam=0.95", text=text
    )
    config = found.loaded.config
    assert found.kind == "ppo" and config.value.model_name == "org/critic" and config.value.optimizer.kwargs["lr"] == 2e-5
    assert config.value_loss_fn.cliprange == 0.5 and config.ppo.policy_training_start_step == 4
    assert (config.ppo.adv_estimator.gae_lambda, config.ppo.adv_estimator.gae_gamma) == (0.95, 1.0)
    assert config.value.train_global_batch_size == 64


def test_the_learning_rate_is_that_of_verl_at_each_batch(translate: Translate) -> None:
    optim = "actor_rollout_ref.actor.optim"
    extra = (
        f"{optim}.lr_scheduler_type=cosine",
        f"{optim}.lr_warmup_steps=10",
        f"{optim}.min_lr_ratio=0.1",
        "trainer.total_training_steps=100",
    )
    loaded = translate(*extra).loaded
    scheduler = loaded.source.values["policy"]["scheduler"]
    ours = make_schedule(scheduler["name"], scheduler["kwargs"], total_steps=100)
    for step in range(100):
        cosine = 0.55 + 0.45 * math.cos(math.pi * (step - 10) / 90)
        assert ours.ratio(step) == pytest.approx(step / 10 if step < 10 else cosine)
    assert loaded.config.policy.scheduler_unit == "batch" and loaded.config.grpo.max_num_steps == 100


def test_parallel_sizes_and_token_budgets_are_carried_over(translate: Translate) -> None:
    actor = "actor_rollout_ref.actor"
    config = translate(
        f"{actor}.ulysses_sequence_parallel_size=2", f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu=8192",
        f"{actor}.fsdp_config.fsdp_size=4", "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ).loaded.config  # fmt: skip
    assert config.policy.dtensor_cfg.context_parallel_size == 2 and config.policy.dtensor_cfg.dp_replicate_size == 2
    assert config.policy.sequence_packing.train_mb_tokens == 16384 and config.policy.reference.offload


def test_megatron_is_carried_over_and_goes_to_the_torch_learner_on_request(translate: Translate) -> None:
    text = SCRIPT.replace("main_ppo \\", "main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\")
    size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    options = translate(size, text=text).loaded.config.policy.megatron_cfg
    assert options.enabled and options.tensor_model_parallel_size == 2
    assert (options.optimizer.lr, options.optimizer.min_lr, options.optimizer.clip_grad) == (1e-6, 0.0, 1.0)
    assert (options.scheduler.lr_decay_style, options.scheduler.lr_warmup_init, options.scheduler.lr_warmup_iters) == (
        "constant",
        0.0,
        0,
    )
    config = translate(size, text=text, overrides=("policy.backend=torch",)).loaded.config
    assert config.policy.dtensor_cfg.tensor_parallel_size == 2 and config.policy.optimizer.kwargs["lr"] == 1e-6


def test_rewards_for_length_and_functions_are_environments(translate: Translate) -> None:
    section = "+reward_model.reward_kwargs"
    extra = (
        f"{section}.overlong_buffer_cfg.enable=True",
        f"{section}.overlong_buffer_cfg.len=512",
        f"{section}.overlong_buffer_cfg.penalty_factor=1.0",
    )
    found = translate("reward_model.reward_manager=dapo", *extra)
    shaping = found.loaded.config.grpo.reward_shaping
    assert (shaping.enabled, shaping.overlong_buffer_length, shaping.max_response_length) == (True, 512, 2048)
    assert found.loaded.config.env["math"].options["verifier"] == "dapo"
    own = translate("custom_reward_function.path=my.py", "custom_reward_function.name=score").loaded.source.values
    assert own["env"] == {"rewards": {"reward": "my.py:score"}}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.video_key=videos", "data.video_key"),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        ),
        ("algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo"),
        ("actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable"),
        ("algorithm.adv_estimator=grpo_passk", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", "actor_rollout_ref.actor.router_replay.mode"),
        ("trainer.resume_mode=resume_path", "trainer.resume_mode"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.clip_ratoi=0.1", "actor_rollout_ref.actor.clip_ratoi"),
        ("trainer.nnodes=$NODES", "trainer.nnodes"),
        ("data.sampler.class_path=a data.sampler.class_name=b", "data.sampler.class_path"),
    ],
)
def test_what_cannot_run_is_refused_once_at_the_key_that_asks_for_it(translate: Translate, override: str, key: str) -> None:
    assert list(refused(translate, override)) == [key]


def test_sft_trains_on_two_columns_or_on_messages(translate: Translate) -> None:
    text = """torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=t.parquet \\
        data.val_files=v.parquet data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question'] \\
        +data.response_dict_keys=['answer'] optim.lr=1e-4 model.partial_pretrain=org/model {EXTRA}"""
    found = translate(text=text)
    config = found.loaded.config
    assert found.kind == "sft" and config.policy.model_name == "org/model" and config.policy.optimizer.kwargs["lr"] == 1e-4
    assert config.cluster.gpus_per_node == 4 and config.policy.train_global_batch_size == 256
    assert (config.data.train[0].input_key, config.data.train[0].output_key) == ("extra_info.question", "extra_info.answer")
    scheduler = found.loaded.source.values["policy"]["scheduler"]
    assert scheduler == {"name": "cosine", "kwargs": {"warmup_ratio": 0.1, "warmup_init_ratio": 0.0}}
    multi = translate("data.multiturn.enable=true", text=text).loaded.config
    assert multi.data.train[0].messages_key == "messages"


def test_a_composed_configuration_is_recognised_and_its_references_resolved(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""
actor_rollout_ref:
  model: {path: org/model, use_fused_kernels: false}
  actor: {_target_: verl.Actor, use_fused_kernels: "${oc.select:actor_rollout_ref.model.use_fused_kernels,true}", ppo_mini_batch_size: 8}
  rollout: {name: vllm, n: 2, response_length: "${oc.select:data.max_response_length,512}"}
data: {train_files: ~/train.parquet, val_files: null, train_batch_size: 8}
algorithm: {adv_estimator: grpo}
trainer: {project_name: p, experiment_name: e, default_local_dir: "ckpt/${trainer.project_name}/${.experiment_name}"}
""")
    assert find_format(path).name == "verl"
    found = translate_recipe(path)
    assert found.loaded.config.checkpointing.checkpoint_dir == "ckpt/p/e"
    assert found.loaded.source.values["data"]["train"]["dataset_name"] == "${oc.env:HOME}/train.parquet"
    assert not is_verl({"grpo": {}})


def test_every_kind_of_variable_of_a_shell_is_expanded_or_named() -> None:
    script = read_script(
        """
export A=2; B="two words"
C=${C:-$A}
ARGS=(
  x.array=1
  x.$A=3
)
cmd="-m verl.trainer.main_ppo"
python3 $cmd x.a=$A x.b="$B" x.c=${C} x.sum=$(((A + 1) * 4 / 3)) x.home=$HOME/data \\
    'x.list=["a","b"]' x.first=${1:-one} ++x.plus=1 "${ARGS[@]}" $@
"""
    )
    assert script.module == "main_ppo" and script.unassigned == {"HOME": "x.home"}
    expected = {
        "x.a": "2", "x.b": "two words", "x.c": "2", "x.sum": "4", "x.home": "${oc.env:HOME}/data", "x.list": '["a","b"]',
        "x.first": "one", "x.plus": "1", "x.array": "1",
    }  # fmt: skip
    assert {key: script.overrides[key] for key in expected} == expected
