"""Two evaluations that were sampled or scored differently, key by key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.checkpointing.saved_model import SavedModel
from strop.config import GrpoRunConfig, load_config
from strop.extensions.comparison.matched_tasks import list_setting_differences
from strop.runs.evaluation_job import identify_entries, make_validation_job
from support.saved_runs import save_run

IDENTITY: dict[str, Any] = {
    "settings": {
        "model": "a",
        "model files": [["model.safetensors", 3, 1]],
        "tokenizer": {"name": "a", "chat_template_kwargs": None},
        "engine": "torch",
        "rules": {"max_length": 64, "max_turns": 1},
        "seeds": [1, 2],
        "save_logprobs": False,
    },
    "sets": {
        "math500": {"samples": 4, "temperature": 1.0, "max_new_tokens": 16, "prompt": "{question}", "size": 8,
                    "env.math": {"verifier": "boxed"}},
    },
}  # fmt: skip


def change(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(IDENTITY)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("sets", "math500", "temperature"), 0.0, "temperature: 1.0 in A, 0.0 in B"),
        (("sets", "math500", "max_new_tokens"), 32, "max_new_tokens: 16 in A, 32 in B"),
        (("sets", "math500", "prompt"), "{question} Think.", 'data.prompt_file: "{question}" in A, "{question} Think." in B'),
        (("sets", "math500", "env.math"), {"verifier": "dapo"}, 'env.math.verifier: "boxed" in A, "dapo" in B'),
        (("sets", "math500", "env.math"), {"verifier": "boxed", "strict": True}, "env.math.strict: null in A, true in B"),
        (("settings", "rules", "max_turns"), 3, "max_rollout_turns: 1 in A, 3 in B"),
        (("settings", "engine"), "vllm", 'engine: "torch" in A, "vllm" in B'),
        (("settings", "tokenizer", "chat_template_kwargs"), {"enable_thinking": True},
         "tokenizer.chat_template_kwargs.enable_thinking: null in A, true in B"),
    ],
)  # fmt: skip
def test_what_samples_and_scores_depend_on_is_named_by_its_key(path: tuple[str, ...], value: Any, said: str) -> None:
    assert [str(each) for each in list_setting_differences(IDENTITY, change(path, value))] == [said]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("settings", "model"), "b"),
        (("settings", "model files"), []),
        (("settings", "tokenizer", "name"), "b"),
        (("settings", "seeds"), [3, 4]),
        (("settings", "save_logprobs"), True),
        (("sets", "math500", "samples"), 16),
        (("sets", "math500", "size"), 4),
    ],
)
def test_models_seeds_and_numbers_of_samples_may_differ(path: tuple[str, ...], value: Any) -> None:
    assert not list_setting_differences(IDENTITY, change(path, value))


def test_one_set_of_each_is_compared_whatever_its_name_and_several_are_named() -> None:
    renamed = change(("sets",), {"MATH-500": {**IDENTITY["sets"]["math500"], "temperature": 0.5}})
    assert [each.key for each in list_setting_differences(IDENTITY, renamed)] == ["temperature"]
    several = change(("sets",), {**IDENTITY["sets"], "gpqa": {"temperature": 1.0}})
    changed = copy.deepcopy(several)
    changed["sets"]["gpqa"]["temperature"] = 0.5
    assert [each.key for each in list_setting_differences(several, changed)] == ["gpqa: temperature"]
    assert not list_setting_differences(several, IDENTITY)


def test_an_evaluation_of_a_run_differs_from_its_validation_in_nothing_but_what_is_asked_for(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = save_run(tmp_path, tiny_model_folder).relative_to(tmp_path)
    config = load_config(logs / "config.yaml", root=GrpoRunConfig).config
    validation = identify_entries(make_validation_job(config, SavedModel(str(logs)))).to_json()
    for asked, said in (([], []), (["generation.temperature=0.5"], ["temperature: 1.0 in A, 0.5 in B"])):
        assert cli.main(["eval", "--json", str(logs), *asked]) == 0
        found = json.loads(Path(json.loads(capsys.readouterr().out)["stored_in"]).read_text())["identity"]
        assert [str(each) for each in list_setting_differences(validation, found)] == said
