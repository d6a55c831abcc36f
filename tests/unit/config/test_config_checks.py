"""Combinations that cannot work are refused when the run starts, with the reason and the way out."""

from pathlib import Path

import pytest

from strop import packages
from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, TrainingRunConfig, load_config
from strop.config.schema.run_config import PpoRunConfig
from strop.runs.summary import summarize
from support.overrides import RUN

EVALUATION = ["generation.model_name=m", "env.math={}"]


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, *overrides], root=GrpoRunConfig)
    return caught.value


def dry_run_refusal(*overrides: str, root: type[TrainingRunConfig] = GrpoRunConfig) -> str:
    """What ``--dry-run``, and the run itself, say against a configuration whose sections have nothing against it."""
    config = load_config(None, [*RUN[:3], "policy.device=cpu", *overrides], root=root).config
    with pytest.raises(ValueError) as caught:
        summarize(config)
    return str(caught.value)


def accepted(*overrides: str) -> list[str]:
    """The warnings of a configuration that is accepted."""
    return [str(problem) for problem in load_config(None, [*RUN, *overrides], root=GrpoRunConfig).warnings]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "always 0, so there is nothing to learn; raise num_generations_per_prompt"),
        (["grpo.use_leave_one_out_baseline=true"], "leave-one-out"),
        (["grpo.use_leave_one_out_baseline=true"], "or set grpo.use_leave_one_out_baseline=false"),
        (["grpo.minus_baseline=false"], "standard deviation"),
        (["grpo.minus_baseline=false", "grpo.normalize_rewards=false", "grpo.use_dynamic_sampling=true"], "dynamic sampling"),
    ],
)
def test_a_group_of_one_cannot_be_compared_with_itself(overrides: list[str], reason: str) -> None:
    assert reason in dry_run_refusal("grpo.num_generations_per_prompt=1", *overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["loss_fn.aggregation=constant_length"], "divides by constant_length, which is not set"),
        (["loss_fn.sequence_level_importance_ratios=true"], "token_level_loss=false"),
        (
            ["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=0"],
            "advantage_clip_low below advantage_clip_high, or one of them",
        ),
    ],
)
def test_a_loss_without_meaning_is_refused(overrides: list[str], reason: str) -> None:
    assert reason in dry_run_refusal(*overrides)


def test_a_group_of_one_is_fine_without_baseline_and_normalisation() -> None:
    assert accepted("grpo.num_generations_per_prompt=1", "grpo.minus_baseline=false", "grpo.normalize_rewards=false") == []


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_batch_may_be_cut_into_equal_steps_of_whole_groups(size: int) -> None:
    assert (
        accepted("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", f"policy.train_global_batch_size={size}")
        == []
    )


@pytest.mark.parametrize("size", [2, 6, 12, 32])
def test_a_batch_that_cuts_groups_or_leaves_a_rest_is_refused_with_the_sizes_that_fit(size: int) -> None:
    error = refusal("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", f"policy.train_global_batch_size={size}")
    assert "one of 16, 8, 4" in str(error)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.generation.max_new_tokens=513", "more than policy.max_total_sequence_length = 512"),
        ("data.max_input_seq_length=513", "more than policy.max_total_sequence_length = 512"),
        ("policy.sequence_packing.train_mb_tokens=100", "a single rollout may have"),
        ("policy.sequence_packing.train_mb_tokens=0", "it must be int >= 1 or one of auto"),
        ("checkpointing.metric_name=val:acuracy", "which is not the name of a metric"),
        ("checkpointing.metric_name=accuracy", "which is not the name of a metric"),
        ("grpo.stop_at_validation_metric=accuracy", "stop_at_validation_threshold"),
        ("policy.optimizer.kwargs={weight_decay: 0}", "it has no lr"),
        ("data.train.env_name=chess", "env has arithmetic"),
        ("data.train.prompt_file=no/such/prompt.txt", "there is no file no/such/prompt.txt"),
        ("data.train.dataset_name=no/such/tasks.jsonl", "there is no file no/such/tasks.jsonl"),
        ("~data.train", "nothing to train on"),
        ("policy.dtensor_cfg.enabled=false", "which leaves no learner"),
        ("policy.dtensor_cfg.tensor_parallel_size=8", "8 ranks do not divide the one device"),
        ("policy.dtensor_cfg.context_parallel_size=2", "2 ranks do not divide the one device"),
        ("policy.dtensor_cfg.cpu_offload=true", "this run has one"),
        ("policy.generation.backend=onnx", "found 'onnx' (a text); it must be one of auto, torch, vllm"),
        ("policy.generation.colocated.enabled=false", "runs on the learner's module"),
        ("cluster.gpus_per_node=0", "which leaves no device to train"),
        ("cluster.environment_hosts=2", "this run has no Ray"),
        ("cluster.segment_size=2", "does not divide cluster.num_nodes = 1"),
        ("policy.dtensor_cfg.expert_parallel_size=3", "divide the 1 ranks of one copy"),
        ("policy.dtensor_cfg.dp_replicate_size=2", "2 ranks do not divide the one device"),
        ("policy.dtensor_cfg.pipeline_parallel_size=2", "2 ranks do not divide the one device"),
        ("policy.dtensor_cfg.pipeline_parallel_layers_per_stage=2", "but with the schedule 1F1B the layers are split evenly"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(override: str, reason: str) -> None:
    error = refusal(override)
    assert reason in str(error) and all(problem.fix for problem in error.problems)
    assert len(error.problems) == 1


def test_a_reference_of_all_data_needs_data_that_is_not_streamed() -> None:
    DpoRunConfig = pytest.importorskip("strop.extensions.recorded.recorded_config").DpoRunConfig
    data = ["policy.model_name=m", "data.train.dataset_name=a/b", "dpo.precompute_reference=true"]
    with pytest.raises(ConfigError, match=r"reads all data before the first step, but a/b is streamed") as caught:
        load_config(None, [*data, "data.train.streaming=true"], root=DpoRunConfig)
    assert [problem.key for problem in caught.value.problems] == ["dpo.precompute_reference"]
    load_config(None, data, root=DpoRunConfig)


def test_an_on_policy_ratio_needs_one_step_per_batch() -> None:
    """The ratio is to the learner before the update, so the age of rollouts does not matter."""
    assert accepted("loss_fn.force_on_policy_ratio=true") == []
    assert accepted("loss_fn.force_on_policy_ratio=true", "grpo.async_grpo.enabled=true") == []
    assert "relative to the sampler" in dry_run_refusal("loss_fn.force_on_policy_ratio=true", "algorithm.ratio_to=sampler")
    for override in ("loss_fn.force_on_policy_ratio=true", "algorithm.on_policy_ratio=true"):
        said = dry_run_refusal(override, "grpo.update_epochs=2")
        assert "loss_fn.force_on_policy_ratio" in said and "there are 2 optimizer steps per batch" in said
    ppo = ["loss_fn.force_on_policy_ratio=true", "ppo.ppo_epochs=2"]
    assert "there are 2 optimizer steps per batch" in dry_run_refusal(*ppo, root=PpoRunConfig)


def test_all_refusals_are_reported_together() -> None:
    said = refusal(
        "cluster.segment_size=2", "policy.dtensor_cfg.context_parallel_size=2", "grpo.stop_at_validation_metric=accuracy"
    )
    assert len(said.problems) == 3


def test_adapters_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "policy.dtensor_cfg.lora_cfg.enabled=true"
    assert accepted(asked) == []
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "peft")
    assert "the package peft is not installed" in str(refusal(asked)) and "pip install -e '.[lora]'" in str(refusal(asked))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["value.train_global_batch_size=4"], "the critic takes its optimizer steps with the policy"),
        (["value.head_only=true", "value.dtensor_cfg.lora_cfg.enabled=true"], "which has no adapters"),
        ([*("value.head_only=true", "cluster.backend=ray", "cluster.gpus_per_node=2"), "policy.dtensor_cfg.pipeline_parallel_size=2"],
         "only the last stage has the hidden states"),
        (["value.optimizer.kwargs={weight_decay: 0}"], "value.optimizer.kwargs: it has no lr"),
        (["value.sequence_packing.train_mb_tokens=100"],
         "value.sequence_packing.train_mb_tokens: found 100, but a single rollout may have"),
        (["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dropout=0.1"], "sampled without dropout"),
    ],
)  # fmt: skip
def test_a_critic_that_cannot_learn_is_refused(overrides: list[str], reason: str) -> None:
    base = [*RUN[:3], "ppo.val_period=0", "checkpointing.metric_name=null"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*base, *overrides], root=PpoRunConfig)
    assert reason in str(caught.value) and len(caught.value.problems) == 1


def test_a_critic_may_repeat_the_policy_s_batch_size() -> None:
    base = [*RUN[:3], "ppo.val_period=0", "checkpointing.metric_name=null"]
    sizes = ["policy.train_global_batch_size=512", "value.train_global_batch_size=${policy.train_global_batch_size}"]
    assert load_config(None, [*base, *sizes], root=PpoRunConfig).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["loss_fn.use_kl_in_reward=true"], True),
        (["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0"], True),
        (["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"], False),
        (["loss_fn.use_kl_in_reward=true", "algorithm.name=reinforce_pp"], False),
        (["loss_fn.use_kl_in_reward=true", "algorithm.kwargs.kl.weight=0.1"], False),
    ],
)
def test_a_kl_term_of_weight_zero_is_said_to_change_nothing(overrides: list[str], warned: bool) -> None:
    assert any("it has no effect: loss_fn.reference_policy_kl_penalty is 0" in text for text in accepted(*overrides)) == warned


def test_a_mere_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strop_no_such_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not packages.is_installed("strop_no_such_package") and packages.is_installed("pydantic")


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("grpo.val_period=10", "there is no validation data"),
        ("checkpointing.metric_name=val:accuracy", "the newest checkpoints are kept"),
        ("policy.generation_batch_size=32", "it has no effect"),
        ("policy.generation.vllm_cfg.tensor_parallel_size=4", "the torch engine does not read"),
        ("cluster.roles.learner.num_cpus=2", "this run is one process"),
        ("policy.dtensor_cfg.custom_parallel_plan=plans:MINE", "tensor_parallel_size is 1"),
    ],
)
def test_what_runs_otherwise_than_it_seems_is_a_warning(override: str, warning: str) -> None:
    assert any(warning in text for text in accepted(override))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("eval.num_tests_per_prompt=4", "would be equal"),
        ("eval.k_value=2", "samples of a task"),
        ("generation.max_new_tokens=4096", "generation.vllm_cfg.max_model_len = 2048"),
        ("cluster.num_nodes=2 cluster.backend=local", "one process runs on one node"),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, [*EVALUATION, *override.split()], root=EvalRunConfig)


def test_a_saved_configuration_can_be_read_without_the_checks() -> None:
    assert load_config(None, [*RUN, "cluster.num_nodes=2"], root=GrpoRunConfig, check=False).config.cluster.num_nodes == 2


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["window=8"], "grpo.async_grpo.window: found 8, but grpo.async_grpo.order is fifo"),
        (["window=8", "order=drop_too_old"], "Set grpo.async_grpo.order=windowed"),
        (["slots=65"], "the run would train on rollouts older than grpo.async_grpo.max_trajectory_age_steps=1"),
        (["slots=65", "order=windowed"], "Set it to 64 or less, or to null; or grpo.async_grpo.order=drop_too_old"),
        (["slots=31"], "a step has 32 groups"),
    ],
)
def test_an_order_has_the_window_and_the_slots_it_can_have(overrides: list[str], reason: str) -> None:
    assert reason in str(refusal(*(f"grpo.async_grpo.{override}" for override in overrides)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], []),
        (["in_flight_weight_updates=true", "recompute_kv_cache_after_weight_updates=true"], ["the torch engine finishes"]),
        (["in_flight_weight_updates=true", "order=windowed", "window=3", "slots=48"], []),
        (["in_flight_weight_updates=true", "order=windowed", "window=3"], ["windowed is the same as fifo"]),
        (["in_flight_weight_updates=true", "order=drop_too_old", "slots=99"], []),
        (["max_trajectory_age_steps=0"], ["max_trajectory_age_steps=0 is synchronous training"]),
        (
            ["recompute_kv_cache_after_weight_updates=true"],
            ["no rollout is running when weights are published", "the torch engine finishes"],
        ),
        (["order=windowed", "slots=48"], ["windowed, which saves little"]),
    ],
)
def test_asynchronous_keys_that_change_little_are_warned_about(overrides: list[str], said: list[str]) -> None:
    found = accepted("grpo.async_grpo.enabled=true", *(f"grpo.async_grpo.{override}" for override in overrides))
    assert len(found) == len(said) and all(part in warning for part, warning in zip(said, found, strict=True))


def test_a_window_has_something_to_do_where_groups_are_dropped() -> None:
    asked = ("enabled=true", "in_flight_weight_updates=true", "order=windowed")
    assert accepted("grpo.use_dynamic_sampling=true", *(f"grpo.async_grpo.{override}" for override in asked)) == []


def test_asynchronous_keys_of_a_synchronous_run_are_not_warned_about() -> None:
    assert accepted("grpo.async_grpo.order=windowed", "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true") == []


def test_rules_of_entries_name_the_entry_as_it_was_written() -> None:
    one, two = (
        "data.train=[{env_name: arithmetic, prompt_file: no.txt}]",
        "data.train=[{prompt_file: no.txt}, {prompt_file: no.md}]",
    )
    assert [problem.key for problem in refusal(one).problems] == ["data.train.prompt_file"]
    assert [problem.key for problem in refusal(two).problems] == ["data.train.0.prompt_file", "data.train.1.prompt_file"]


def test_defaults_of_entries_are_checked_where_an_entry_takes_them() -> None:
    asked = "data.default.prompt_file=no.txt"
    assert [problem.key for problem in refusal(asked).problems] == ["data.train.prompt_file"]
    assert accepted(asked, f"data.train.prompt_file={__file__}") == []


def test_rules_of_a_teacher_name_the_teacher() -> None:
    assert teacher_problems("teachers.second.model_name=self", "algorithm.name=distillation") == ["teachers.second.demonstration"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["teacher.model_name=self"], "teacher.demonstration"),
        (["teacher.demonstration=x"], "teacher.demonstration"),
        (["teacher.environments=[arithmetic,arithmetics]"], "teacher.environments"),
        (["teachers.second.model_name=t"], "teachers"),
        (["teacher.model_name=self", "teacher.demonstration=x", "teacher.self_weights=ema"], "teacher.self_weights"),
        (["teacher.model_name=self", "teacher.demonstration=x", "cluster.backend=ray"], "teacher.model_name"),
        (["teacher.dtensor_cfg.tensor_parallel_size=2"], "teacher.dtensor_cfg.tensor_parallel_size"),
        (["cluster.gpus_per_node=4", "teacher.dtensor_cfg.tensor_parallel_size=3"], "teacher.dtensor_cfg.tensor_parallel_size"),
        (["cluster.gpus_per_node=4", "teacher.dtensor_cfg.tensor_parallel_size=4", "teacher.hosts=1"], "teacher.hosts"),
        (["cluster.gpus_per_node=4", "policy.device=cuda", "teacher.device=cpu"], "teacher.device"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_a_model_is_loaded(overrides: list[str], key: str) -> None:
    assert teacher_problems(*overrides) == [key]


@pytest.mark.parametrize(
    "overrides",
    [
        ["teachers.second.model_name=t", "algorithm.name=distillation"],
        ["teachers.second.model_name=t", "teacher.environments=[arithmetic]"],
        ["teacher.model_name=self", "teacher.demonstration=x", "teacher.self_weights=ema", "policy.ema.enabled=true"],
        ["cluster.gpus_per_node=4", "teacher.dtensor_cfg.tensor_parallel_size=4", "policy.dtensor_cfg.context_parallel_size=2"],
        ["cluster.gpus_per_node=4", "teacher.hosts=2"],
        ["teacher.dtensor_cfg.cpu_offload=true"],
    ],
)  # fmt: skip
def test_teachers_that_can_are_not(overrides: list[str]) -> None:
    assert teacher_problems(*overrides) == []


def teacher_problems(*overrides: str) -> list[str]:
    """The keys that a distillation is refused for."""
    DistillationRunConfig = pytest.importorskip("strop.extensions.distillation.distillation_config").DistillationRunConfig
    base = [*RUN[:3], "distillation.val_period=0", "teacher.model_name=t"]
    try:
        load_config(None, [*base, *overrides], root=DistillationRunConfig)
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    return []


def test_a_run_on_recorded_data_has_its_own_metrics_and_asks_nothing_of_an_engine() -> None:
    SftRunConfig = pytest.importorskip("strop.extensions.recorded.recorded_config").SftRunConfig
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "sft.val_period=0", "policy.generation.temperature=0.001"]
    warned = load_config(None, [*base, "checkpointing.metric_name=val:nll"], root=SftRunConfig).warnings
    assert any("does not read policy.generation.temperature" in str(problem) for problem in warned)
    with pytest.raises(ConfigError, match=r"or one of .*val:nll"):
        load_config(None, [*base, "checkpointing.metric_name=val:reward"], root=SftRunConfig)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy.generation.colocated.enabled=false"], "the engine has its own devices"),
        (["policy.device=cpu", "grpo.async_grpo.enabled=true"], "asynchronous training samples while"),
    ],
)
def test_an_offload_that_nothing_can_use_is_named(overrides: list[str], reason: str) -> None:
    found = accepted("policy.generation.backend=vllm", "policy.offload=true", *overrides)
    assert [problem for problem in found if "policy.offload" in problem and reason in problem]
    assert not [problem for problem in accepted("policy.offload=true") if "policy.offload" in problem]


def test_a_teacher_s_keys_that_only_training_uses_are_named() -> None:
    DistillationRunConfig = pytest.importorskip("strop.extensions.distillation.distillation_config").DistillationRunConfig
    base = [*RUN[:3], "distillation.val_period=0", "teacher.model_name=t", "teacher.dtensor_cfg.activation_checkpointing=true"]
    warnings = load_config(None, [*base, "teacher.dtensor_cfg.enabled=false"], root=DistillationRunConfig).warnings
    found = [problem.key for problem in warnings if "it has no effect: a teacher" in str(problem)]
    assert found == ["teacher.dtensor_cfg.enabled", "teacher.dtensor_cfg.activation_checkpointing"]


PAST = ["env.game.type=two_player", "env.game.opponent=past", "data.train.env_name=game"]


def test_earlier_selves_of_the_policy_need_the_learner_in_this_process_and_a_run_that_trains() -> None:
    assert "torch engine in the learner's process, and this run has vLLM engines" in str(
        refusal(*PAST, "policy.generation.backend=vllm")
    )
    assert "learners in other processes" in str(refusal(*PAST, "cluster.backend=ray", "cluster.environment_hosts=1"))
    with pytest.raises(ConfigError, match="has no earlier selves"):
        load_config(None, ["generation.model_name=m", *PAST[:2], "data.env_name=game"], root=EvalRunConfig)
    accepted(*PAST)


@pytest.mark.extensions
def test_a_misspelt_built_in_set_is_not_taken_for_rows_without_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"data\.dataset_name: 'gsm8kk' is not .* did you mean 'gsm8k'\?.* others"):
        load_config(None, ["generation.model_name=m", "data.dataset_name=gsm8kk"], root=EvalRunConfig)


@pytest.mark.extensions
def test_the_tasks_of_a_built_in_set_are_shown_with_what_grades_them() -> None:
    config = load_config(None, ["generation.model_name=m", "data.dataset_name=gsm8k"], root=EvalRunConfig).config
    assert "tasks       gsm8k (math)" in summarize(config)


AUTO = "policy.sequence_packing.train_mb_tokens=auto"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["cluster.backend=ray", "cluster.gpus_per_node=2", "grpo.async_grpo.enabled=true"],
            "an engine in another process shares the learner's device",
        ),
        (
            ["cluster.backend=ray", "cluster.gpus_per_node=2", "policy.dtensor_cfg.pipeline_parallel_size=2"],
            "with pipeline stages several micro-batches are in memory at once",
        ),
    ],
)
def test_a_budget_that_cannot_be_measured_is_refused(overrides: list[str], reason: str) -> None:
    text = str(refusal(AUTO, *overrides))
    assert f"train_mb_tokens: found auto, but {reason}" in text and "Set it to a number of tokens." in text


def test_a_budget_is_measured_where_the_engine_runs_the_learner_s_module() -> None:
    assert accepted(AUTO) == []
    assert "micro-batches" not in str(accepted(AUTO, "policy.sequence_packing.prefix_sharing=false"))


def test_a_budget_is_measured_where_an_engine_sleeps_while_the_learner_trains() -> None:
    assert accepted(AUTO, "cluster.backend=ray", "cluster.gpus_per_node=2") == []


@pytest.mark.parametrize(
    ("overrides", "reason", "remedy"),
    [
        (["policy.router_replay.enabled=true"], "recorded experts", "policy.router_replay.enabled=false"),
        (["policy.sequence_packing.enabled=false"], "padded rows", "policy.sequence_packing.enabled=true"),
        (["policy.dtensor_cfg.lora_cfg.enabled=true"], "adapters switched off", "policy.dtensor_cfg.lora_cfg.enabled=false"),
    ],
)
def test_layers_are_not_compiled_beside_what_they_cannot_follow(overrides: list[str], reason: str, remedy: str) -> None:
    text = str(refusal("policy.compile=true", *overrides))
    assert "policy.compile: found true" in text and reason in text and remedy in text
    assert not [problem for problem in accepted(*overrides) if "policy.compile" in problem]  # auto leaves them as they are


def test_layers_are_compiled_with_ordinary_settings() -> None:
    assert not [problem for problem in accepted("policy.compile=true") if "policy.compile" in problem]
    assert not [problem for problem in accepted("policy.compile=auto") if "policy.compile" in problem]


GPU = "policy.device=cuda"
VLLM = "policy.generation.backend=vllm"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([VLLM, "policy.device=cpu"], "policy.deterministic", "vLLM's batch-invariant mode exists only on GPUs"),
        ([AUTO, GPU], "policy.sequence_packing.train_mb_tokens", "may cut a batch differently in another run"),
        (["grpo.async_grpo.enabled=true", GPU], "policy.deterministic", "the rollouts of a step depend on their speed"),
    ],
)
def test_a_deterministic_run_is_refused_where_something_lets_equal_runs_differ(
    overrides: list[str], key: str, reason: str
) -> None:
    text = str(refusal("policy.deterministic=true", *overrides))
    assert f"{key}: found" in text and reason in text
    assert "policy.deterministic" not in str(refusal("policy.precision=nonsense", *overrides)), "only then"


def test_a_deterministic_run_is_warned_of_turns_that_come_when_environments_answer() -> None:
    def warned(*overrides: str) -> bool:
        return "only if their environments answer in the same order" in str(
            accepted("policy.deterministic=true", GPU, *overrides)
        )

    turns = "grpo.max_rollout_turns=3"
    assert warned(turns)
    assert not warned() and not warned(turns, VLLM)
