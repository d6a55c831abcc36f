"""IFEval and RLVR-IFeval by name, from local copies of the real schema to the number."""

from __future__ import annotations

import pytest

from support.scripted_evaluation import evaluate_script

ANSWERS = {"Name a colour": "A deep red", "Name an animal": '```json\n{"animal": "cat"}\n```', "Greet me": "hello there."}


def follow(prompt: str) -> str:
    return f"<think>Well, which one, then?</think>\n\n{next(text for words, text in ANSWERS.items() if words in prompt)}"


def ignore(prompt: str) -> str:
    return "Red, I WOULD say"


@pytest.mark.parametrize("name", ["ifeval", "RLVR-IFeval"])
def test_replies_that_follow_have_accuracy_1_and_others_0(name, local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    for answer, accuracy in ((follow, 1.0), (ignore, 0.0)):
        report = evaluate_script(monkeypatch, capsys, tiny_model_folder, name, answer)
        assert report["metrics"]["accuracy"] == accuracy and report["metrics"]["errors"] == 0


def test_the_four_accuracies_of_ifeval_are_those_that_are_reported(local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    def reply(prompt: str) -> str:  # follows one of two instructions, and the third without its first line
        return "Red, I say" if "colour" in prompt else 'Here it is:\n{"animal": "cat"}'

    metrics = evaluate_script(monkeypatch, capsys, tiny_model_folder, "ifeval", reply)["metrics"]
    prefix = "environments/ifeval/"
    found = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert (metrics["accuracy"], found["prompt_level_strict"], found["prompt_level_loose"]) == (0.0, 0.0, 0.5)
    assert found["instruction_level_strict"] == pytest.approx(1 / 3)
    assert found["instruction_level_loose"] == pytest.approx(2 / 3)
