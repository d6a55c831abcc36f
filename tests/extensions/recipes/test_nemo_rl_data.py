"""Data, environments and chat templates of NeMo-RL's recipes: each key means what it means there, or says what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.data.sources.source import DataSource
from strop.extensions.recipes.rules import Effect
from strop.extensions.recorded.examples import conversations, preferences
from strop.types import assistant, system, user

GRPO = """
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, val_period: 0}
policy: {model_name: m, max_total_sequence_length: 64, train_global_batch_size: 4}
checkpointing: {metric_name: null}
data:
  use_multiple_dataloader: false
  train: {dataset_name: gsm8k}
  default: {prompt_file: null, processor: math_hf_data_processor, env_name: math}
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
"""
SFT = """
sft: {val_period: 0, max_num_steps: 3}
policy: {model_name: m, max_total_sequence_length: 64}
checkpointing: {metric_name: null}
data: {add_bos: true, add_eos: true, add_generation_prompt: false, default: {processor: sft_processor}}
"""
DPO = SFT.replace("sft:", "dpo:").replace("add_bos: true, add_eos: true, add_generation_prompt: false, ", "")
DPO = DPO.replace("default: {processor: sft_processor}", "num_workers: 1")
EVAL = """
eval: {num_tests_per_prompt: 1}
generation: {model_name: m}
data: {dataset_name: AIME2024, processor: math_hf_data_processor, prompt_file: null, repeat: 1}
env: {math: {num_workers: 8}}
"""
RECIPES = {"grpo": GRPO, "sft": SFT, "dpo": DPO, "eval": EVAL}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(kind: str, *overrides: str) -> LoadedConfig[Any]:
    Path("recipe.yaml").write_text(RECIPES[kind])
    return load_config("recipe.yaml", overrides, root=TRAINING_RUNS.get(kind, EvalRunConfig))


def refusals(kind: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(kind, *overrides)
    return [str(problem) for problem in caught.value.problems]


def differences(loaded: LoadedConfig[Any], effect: Effect) -> dict[str, str]:
    return {each.key: each.text for each in loaded.differences if each.effect is effect}


def write_rows(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


# --- environments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "verifier"),
    [
        ("{math_verify_impl: hf_math_verify}", "math_verify"),
        ("{math_verify_impl: dapo_math_verify}", "dapo"),
        ("{verifier_type: math, math_verify_impl: dapo_math_verify}", "dapo"),
        ("{verifier_type: english_multichoice}", "english_multichoice"),
        ("{verifier_type: multilingual_multichoice, math_verify_impl: hf_math_verify}", "multilingual_multichoice"),
    ],
)
def test_a_verifier_of_the_math_environment_is_the_same_here(options: str, verifier: str) -> None:
    loaded = load("grpo", "~env.math.math_verify_impl", f"env.math={options}")
    assert loaded.config.env["math"].options == {"num_workers": 8, "verifier": verifier}
    renamed = differences(loaded, Effect.RENAMED)
    assert f"env.math.verifier={verifier} here" in renamed.values() and not differences(loaded, Effect.CHANGED)


def test_the_interpreter_and_the_overlap_of_words_are_environments_here() -> None:
    loaded = load("grpo", "data.default.env_name=code", "env.code={num_workers: 4, terminate_on_evaluation: false}")
    assert loaded.config.env["code"].type_of("code") == "code_interpreter"
    assert loaded.config.env["code"].options == {"terminate_on_evaluation": False}
    assert "sandbox.workers" in differences(loaded, Effect.UNUSED)["env.code.num_workers"]
    assert "NeMo-RL leaves to an environment around it" in differences(loaded, Effect.CHANGED)["env.code"]
    loaded = load("grpo", "data.default.env_name=code_jaccard", "env.code_jaccard={num_workers: 4, stop_strings: null}")
    assert loaded.config.env["code_jaccard"].options == {} and loaded.config.env["code_jaccard"].type is None
    ours = load("grpo", "data.default.env_name=code", "env.code={language: cpp, score: fraction}")
    assert ours.config.env["code"].type_of("code") == "code" and not differences(ours, Effect.CHANGED)


def test_a_reward_model_keeps_what_changes_its_scores() -> None:
    section = (
        "{model_name: rm, tokenizer: {name: '${env.reward_model.model_name}'}, precision: bfloat16, batch_size: 4, max_model_len: 2048, "
        "checkpoint_path: null, resources: {gpus_per_node: 1, num_nodes: 1}, dtensor_cfg: {enabled: true}, sequence_packing: "
        "{enabled: false}, max_grad_norm: null, reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}}"
    )
    loaded = load("grpo", "data.default.env_name=reward_model", f"env.reward_model={section}")
    options = {"model_name": "rm", "precision": "bfloat16", "batch_size": 4, "max_length": 2048}
    assert loaded.config.env["reward_model"].options == options
    assert "its own chat template" in differences(loaded, Effect.CHANGED)["env.reward_model"]
    assert "gives it one of its own" in differences(loaded, Effect.UNUSED)["env.reward_model.resources"]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "context_parallel_size"])
def test_a_reward_model_that_is_divided_has_its_layers_on_all_gpus(size: str) -> None:
    section = f"{{model_name: rm, precision: bfloat16, batch_size: 4, dtensor_cfg: {{enabled: true, {size}: 4}}}}"
    loaded = load("grpo", "data.default.env_name=reward_model", f"env.reward_model={section}")
    assert loaded.config.env["reward_model"].options["device_map"] == "balanced"
    assert "layers stand on all GPUs" in differences(loaded, Effect.CHANGED)[f"env.reward_model.dtensor_cfg.{size}"]


# --- data sets -------------------------------------------------------------------------------------------------------------


def test_responses_at_a_path_are_read_from_messages_or_else_from_their_two_columns() -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for row, keys in (
        ({"input": "2+2?", "output": "4", "problem": "not this"}, []),
        ({"input": "not this", "output": "x", "messages": talk}, []),
        ({"q": "2+2?", "output": "4"}, ["data.default.input_key=q"]),
    ):
        path = write_rows("rows.jsonl", row)
        own = [f"data.train.data_path={path}", *keys]
        sft = load("sft", "data.default.dataset_name=ResponseDataset", *own).config
        (example,) = conversations(DataSource.from_entry(sft.data.train[0], seed=0, part="train"))
        assert example.messages == (user("2+2?"), assistant("4"))
        grpo = load("grpo", "data.train.dataset_name=ResponseDataset", *own).config
        (task,) = DataSource.from_entry(grpo.data.train[0], seed=0, part="train").load_rows()
        assert (task.question, task.answer) == ("2+2?", "4")


def test_conversations_in_openai_format_have_a_column_of_system_prompts() -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = write_rows("rows.jsonl", {"chat": talk, "about": "Be brief."}, {"chat": talk})
    entry = f"data.train={{dataset_name: openai_format, data_path: {path}, chat_key: chat, system_key: about}}"
    config = load("sft", entry).config
    both = conversations(DataSource.from_entry(config.data.train[0], seed=0, part="train"))
    assert [example.messages[0] for example in both] == [system("Be brief."), user("2+2?")]
    with_tools = load("sft", entry[:-1] + ", tool_key: functions}").config
    assert with_tools.data.train[0].tool_key == "functions"


def test_preferences_are_read_by_rank_or_from_three_columns() -> None:
    reply = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    ranked = {"context": [{"role": "user", "content": "2+2?"}], "completions": [{"rank": 1, "completion": reply[1]}]}
    ranked["completions"].insert(0, {"rank": 0, "completion": reply[0]})
    for row, more in (
        (ranked, "dataset_name: PreferenceDataset"),
        ({"context": ranked["context"], "completions": ranked["completions"][::-1]}, "dataset_name: PreferenceDataset"),
        ({"q": "2+2?", "chosen": "4", "bad": "5"}, "dataset_name: BinaryPreferenceDataset, prompt_key: q, rejected_key: bad"),
    ):
        config = load("dpo", f"data.train={{data_path: {write_rows('pairs.jsonl', row)}, {more}}}").config
        (pair,) = preferences(DataSource.from_entry(config.data.train[0], seed=0, part="train"))
        assert (pair.prompt, pair.chosen, pair.rejected) == ((user("2+2?"),), (assistant("4"),), (assistant("5"),))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train.dataset_name=ResponseDataset"], "data.train.dataset_name: found ResponseDataset, but no data_path to read"),
        (["data.train.dataset_name=arrow_text"], "data.train.dataset_name: found arrow_text, but no data_files to read"),
        (["data.train.dataset_name=NuminaMath-1.5", "data.train.require_valid=false"],
         "data.train.require_valid: found False, but NuminaMath-1.5 is read without the rows that cannot be checked"),
        (["data.default.processor=my_processor"], "data.default.processor: found 'my_processor': a processor is code of NeMo-RL"),
        (["data.use_multiple_dataloader=true", "data.custom_dataloader=a.b.mine"], "drawn by weight, not by code"),
        (["data.use_multiple_dataloader=true", "data.custom_dataloader=a.example_custom_dataloader_with_chosen_task"],
         "it is told by a changed training loop of which entries a step is (set_records)"),
        (["data.use_multiple_dataloader=true"], "data.custom_dataloader is not set, without which NeMo-RL does not run either"),
        (["data.use_multiple_dataloader=true", "data.custom_dataloader=a.example_custom_dataloader"],
         "data.num_prompts_per_dataloader is not set"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_refused_once_by_the_true_reason(overrides: list[str], said: str) -> None:
    (problem,) = refusals("grpo", *overrides)
    assert said in problem


@pytest.mark.parametrize(
    "name", ["NuminaMath-1.5", "open_assistant", "OpenMathInstruct-2", "Nemotron-Cascade-2-SFT-Math", "DAPOMath17K"]
)
def test_a_set_of_nemo_rl_has_the_same_name_here(name: str) -> None:
    kind = "sft" if name in ("open_assistant", "Nemotron-Cascade-2-SFT-Math") else "grpo"
    loaded = load(kind, f"data.train.dataset_name={name}")
    assert loaded.config.data.train[0].dataset_name == name and not differences(loaded, Effect.CHANGED)


def test_raw_text_is_read_from_its_files_and_joined_as_it_says() -> None:
    path = write_rows("rows.jsonl", {"body": "one"}, {"body": "two"}, {"body": "three"})
    options = [f"data.train.data_files={path}", "data.train.text_key=body", "data.train.characters_per_sample=5"]
    loaded = load("sft", "data.train.dataset_name=arrow_text", *options)
    (entry,) = loaded.config.data.train
    assert (entry.dataset_name, entry.text_key, entry.characters_per_sample) == (path, "body", 5)
    assert [each.answer for each in conversations(DataSource.from_entry(entry, seed=0, part="train"))] == ["one\ntwo", "three"]
    (entry,) = load("sft", "data.train.dataset_name=arrow_text", f"data.train.data_files={path}").config.data.train
    assert entry.text_key == "text" and entry.characters_per_sample is None


def test_entries_of_a_recipe_are_joined_or_take_equal_turns_as_it_says() -> None:
    two = "data.train=[{dataset_name: gsm8k}, {dataset_name: DeepScaler, processor: math_hf_data_processor}]"
    assert [entry.weight for entry in load("grpo", two).config.data.train] == [None, None]
    turns = [
        "data.use_multiple_dataloader=true",
        "data.custom_dataloader=a.example_custom_dataloader",
        "data.num_prompts_per_dataloader=1",
    ]
    assert [entry.weight for entry in load("grpo", two, *turns).config.data.train] == [1.0, 1.0]
    assert [entry.weight for entry in load("grpo", two, "~data.use_multiple_dataloader").config.data.train] == [1.0, 1.0]


def test_several_loaders_give_as_many_prompts_of_each_entry_in_every_step() -> None:
    two = "data.train=[{dataset_name: gsm8k}, {dataset_name: DeepScaler, processor: math_hf_data_processor}]"
    loaders = ["data.use_multiple_dataloader=true", "data.custom_dataloader=a.example_custom_dataloader"]
    loaded = load(
        "grpo",
        two,
        *loaders,
        "data.num_prompts_per_dataloader=16",
        "grpo.num_prompts_per_step=32",
        "policy.train_global_batch_size=64",
    )
    assert [entry.prompts_per_step for entry in loaded.config.data.train] == [16, 16]
    assert loaded.config.grpo.max_num_epochs is None
    assert "ends after max_num_steps alone" in differences(loaded, Effect.CHANGED)["grpo.max_num_epochs"]
    one = load("grpo", *loaders, "data.num_prompts_per_dataloader=2").config
    assert [entry.prompts_per_step for entry in one.data.train] == [2]
    (problem,) = refusals("grpo", two, *loaders, "data.num_prompts_per_dataloader=2")
    assert "have 2 + 2 = 4 groups per step, but grpo.num_prompts_per_step is 2" in problem


@pytest.mark.parametrize(
    ("overrides", "entry"),
    [
        (["data.dataset_name=gpqa", "env.math.verifier_type=multilingual_multichoice"], {"dataset_name": "gpqa"}),
        (["data.dataset_name=mmlu_ZH-CN"], {"dataset_name": "mmlu_ZH-CN"}),
        (["data.dataset_name=mmlu_pro"], {"dataset_name": "mmlu_pro"}),
        (["data.dataset_name=math"], {"dataset_name": "math"}),
        (
            [
                "data.dataset_name=https://example.org/math.csv",
                "data.problem_key=Question",
                "data.solution_key=Answer",
                "data.split=train",
                "data.file_format=csv",
            ],
            {"dataset_name": "https://example.org/math.csv", "input_key": "Question", "output_key": "Answer"},
        ),
    ],
)
def test_the_data_of_an_evaluation_is_named_as_there(overrides: list[str], entry: dict[str, str]) -> None:
    data = load("eval", *overrides).config.data
    assert {name: getattr(data, name) for name in entry} == entry


# --- prompts and templates -------------------------------------------------------------------------------------------------


def test_a_prompt_file_is_found_beside_the_recipe_or_above_it_and_the_working_directory_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "examples" / "configs"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(GRPO.replace("prompt_file: null", "prompt_file: examples/prompts/math.txt"))
    with pytest.raises(ConfigError, match=r"recipe.yaml, line 7.*there is no file examples/prompts/math.txt .*nor in the folder"):
        load_config(folder / "recipe.yaml", root=GrpoRunConfig)
    saved = load_config(folder / "recipe.yaml", root=GrpoRunConfig, check=False).config
    assert saved.data.train[0].prompt_file == "examples/prompts/math.txt"
    theirs = tmp_path / "repository" / "examples" / "prompts" / "math.txt"
    theirs.parent.mkdir()
    theirs.write_text("theirs {}")
    entry = load_config(folder / "recipe.yaml", root=GrpoRunConfig).config.data.train[0]
    assert entry.prompt_file == str(theirs)
    ours = tmp_path / "examples" / "prompts" / "math.txt"
    ours.parent.mkdir(parents=True)
    ours.write_text("ours {}")
    entry = load_config(folder / "recipe.yaml", root=GrpoRunConfig).config.data.train[0]
    assert (
        entry.prompt_file == "examples/prompts/math.txt"
        and DataSource.from_entry(entry, seed=0, part="train").load_template().prefix == "ours "
    )


def test_a_chat_template_is_read_from_its_file_which_the_run_then_does_not_need() -> None:
    def template_of(value: str) -> str | None:
        return load("grpo", f"policy.tokenizer.chat_template='{value}'").config.policy.tokenizer.chat_template

    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    Path("own.jinja").write_text(text)
    assert template_of("own.jinja") == template_of(str(Path("own.jinja").absolute())) == text
    for value in ("default", "passthrough", "{{ messages }}"):
        assert template_of(value) == value
    for value in ("missing.jinja", "/no/such/file", "templates"):
        (said,) = refusals("grpo", f"policy.tokenizer.chat_template={value}")
        assert "policy.tokenizer.chat_template" in said and "neither a Jinja template nor a file with one" in said


def test_an_evaluation_is_asked_and_graded_as_there_and_not_as_the_set_is_reported_here() -> None:
    config = load("eval").config
    assert config.data.prompt_file is None and config.env["math"].options["verifier"] == "math_verify"
    assert (
        load("eval", "env.math.verifier_type=english_multichoice").config.env["math"].options["verifier"] == "english_multichoice"
    )
