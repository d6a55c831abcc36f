"""``strop export``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import cli
from strop.models.adapters import save_adapters
from strop.models.loading import load_model, load_tokenizer
from strop.results import Run
from support.lora import with_random_adapters
from support.models import build
from support.saved_runs import load, save_policy, save_run
from support.tokenizer import build_tokenizer


@pytest.fixture(params=["whole", "shards", "adapters"])
def logs(request: pytest.FixtureRequest, tmp_path: Path, tiny_model_folder: Path) -> Path:
    return save_run(tmp_path, tiny_model_folder, request.param, steps=(4,))


def test_every_layout_loads_in_transformers_with_its_tokenizer(logs: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = tmp_path / "results/mine/step_4/policy/weights"
    is_adapters = (weights / "adapter_config.json").exists()
    out = tmp_path / "exported"
    assert cli.main(["export", str(logs), str(out), *(["--merge"] if is_adapters else [])]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = reference(tmp_path, tiny_model_folder, weights)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert (
        AutoTokenizer.from_pretrained(out)("3 + 4").input_ids
        == AutoTokenizer.from_pretrained(tiny_model_folder)("3 + 4").input_ids
    )
    assert (out / "generation_config.json").exists() and not list(out.glob("*.distcp"))
    assert (out / "strop_config.yaml").read_text() == (logs / "config.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "logs", "results"] or is_adapters


def reference(root: Path, model_folder: Path, weights: Path) -> dict[str, Any]:
    """The weights that a checkpoint of step 4 holds."""
    if (weights / "adapter_config.json").exists():
        return dict(load(weights).state_dict())
    save_policy(root / "again", model_folder, "whole", seed=4)
    expected = dict(load(root / "again/weights").state_dict())
    shutil.rmtree(root / "again")
    return expected


def test_the_card_tells_the_facts_of_the_run(logs: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    assert cli.main(["export", str(logs), str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported/README.md").read_text()
    for said in (
        f"| Base model | {tiny_model_folder} |",
        "| Algorithm | grpo |",
        "| Step | 4 |",
        "| Environments | arithmetic |",
    ):
        assert said in card
    assert "base_model:" not in card, "the hub refuses a folder there"
    assert "| validation/accuracy | 0.25 |" in card and "| Strop |" in card


def test_the_draft_head_goes_along_without_the_state_of_its_training(tmp_path: Path, tiny_model_folder: Path) -> None:
    logs = save_run(tmp_path, tiny_model_folder, "whole", steps=(4,))
    head = tmp_path / "results/mine/step_4/policy/draft"
    head.mkdir()
    for name in ("config.json", "model.safetensors", "training.pt"):
        (head / name).write_text(name)
    assert cli.main(["export", str(logs), str(tmp_path / "exported")]) == 0
    found = {path.name: path.read_text() for path in (tmp_path / "exported" / "draft").iterdir()}
    assert found == {name: name for name in ("config.json", "model.safetensors")}


def test_adapters_stay_adapters_unless_they_are_merged(tmp_path: Path, tiny_model_folder: Path) -> None:
    from peft import PeftModel

    logs, out = save_run(tmp_path, tiny_model_folder, "adapters"), tmp_path / "adapters"
    assert cli.main(["export", str(logs), str(out), "--dtype", "bfloat16"]) == 0
    model = PeftModel.from_pretrained(load(tiny_model_folder), str(out))
    assert any("lora_A" in name for name, _ in model.named_parameters())
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model_folder)
    assert "library_name: peft" in (out / "README.md").read_text()


def test_the_data_type_and_the_size_of_the_files_are_chosen(tmp_path: Path, tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    logs = save_run(tmp_path, tiny_model_folder, "shards", steps=(4,))
    out = tmp_path / "out"
    assert cli.main(["export", str(logs), str(out), "--dtype", "bfloat16", "--max-shard-size", "20KB", "--ema"]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1 and json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(AutoModelForCausalLM.from_pretrained(out, dtype="auto").parameters()).dtype == torch.bfloat16
    assert "averaged (EMA)" in (out / "README.md").read_text()


def test_the_heads_of_reward_models_and_critics_are_exported(tmp_path: Path, tiny_model_folder: Path, capsys: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    from strop.models.value_network import ScalarHead, load_classifier

    save_run(tmp_path, tiny_model_folder, steps=(4,))
    checkpoint = tmp_path / "results/mine/step_4"
    critic = load_classifier(str(tiny_model_folder), seed=1)
    critic.save_pretrained(checkpoint / "value/weights")
    assert cli.main(["export", str(checkpoint), str(tmp_path / "critic"), "--critic"]) == 0
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(found.score.weight, critic.score.weight)
    shutil.rmtree(checkpoint / "value/weights")
    ScalarHead(32).save_pretrained(checkpoint / "value/weights")
    assert cli.main(["export", str(checkpoint), str(tmp_path / "head"), "--critic"]) == 0
    assert ScalarHead.from_pretrained(tmp_path / "head").score.in_features == 32


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["logs/mien", "out"], 2, "did you mean logs/mine?"),
        (["logs/mine", "logs"], 1, "logs already exists; remove it, or name another folder"),
        (["logs/mine", "out", "--merge"], 1, "has no adapters to merge; leave out --merge"),
        (["logs/mine", "out", "--push", "me/mine"], 1, "--push needs a token of the hub"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_a_reason(
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    save_run(tmp_path, tiny_model_folder, steps=(4,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert cli.main(["export", *arguments]) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "out").exists() and not (tmp_path / ".tmp_out").exists()


def test_a_failure_in_the_middle_leaves_nothing_behind(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    logs = save_run(tmp_path, tiny_model_folder, steps=(4,))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strop.extensions.export.export_model.format_model_card", full)
    assert cli.main(["export", str(logs), str(tmp_path / "out")]) == 1
    assert "out cannot be written: No space left on device; nothing was left behind" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / ".tmp_out").exists()


def test_the_folder_is_uploaded_to_the_hub(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    logs, calls = save_run(tmp_path, tiny_model_folder, steps=(4,)), []

    class FakeApi:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append((name, private, exist_ok))
            return f"https://hub.example/{name}"

        def upload_folder(self, *, folder_path: Path, repo_id: str, commit_message: str) -> None:
            if repo_id == "me/broken":
                raise ConnectionError("no network")
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    assert cli.main(["export", str(logs), str(tmp_path / "out"), "--push", "me/mine", "--private"]) == 0
    assert calls[0] == ("me/mine", True, True) and {"model.safetensors", "README.md"} <= set(calls[1][1])
    assert "uploaded to https://hub.example/me/mine" in capsys.readouterr().out
    assert cli.main(["export", str(logs), str(tmp_path / "again"), "--push", "me/broken"]) == 1
    assert "was written and not uploaded to me/broken: the hub returned ConnectionError: no network" in capsys.readouterr().err
    assert (tmp_path / "again/config.json").exists()


def test_a_folder_of_adapters_becomes_an_ordinary_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([[5, 6, 7, 8]])
    build("llama").save_pretrained(tmp_path / "base")
    model = with_random_adapters(load_model(str(tmp_path / "base")), base=str(tmp_path / "base"))
    save_adapters(model, tmp_path / "adapters")
    build_tokenizer().save_pretrained(tmp_path / "adapters")
    assert cli.main(["export", str(tmp_path / "adapters"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-4)
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in build("llama").named_parameters()}
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert load_tokenizer(str(tmp_path / "merged")).encode("stop") == load_tokenizer(str(tmp_path / "adapters")).encode("stop")


def test_a_run_exports_its_checkpoint(logs: Path, tmp_path: Path) -> None:
    folder = Run(logs).export(tmp_path / "out", dtype="bfloat16")
    assert folder == tmp_path / "out" and (folder / "README.md").exists()
