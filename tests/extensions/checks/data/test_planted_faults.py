"""``strop data check`` finds each kind of fault where it was planted, and nothing in sound data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.config import EvalRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.checks.data_check import DataCheckOptions, check_data
from strop.extensions.checks.data_report import DataReport, format_report
from support.vision_models import draw_image, save_vision_model

GOLDEN = Path(__file__).parents[3] / "golden" / "data_check.txt"
FRUIT = ("apples", "pears", "plums", "figs", "limes", "dates", "kiwis")
Check = Callable[..., DataReport]
Row = dict[str, Any]


def question(n: int) -> str:
    return f"Ann has {n} {FRUIT[n % 7]} and gets {3 * n + 2} more. How many are there now?"


def problems(count: int, first: int = 0) -> list[Row]:
    return [{"problem": question(n), "answer": str(4 * n + 2)} for n in range(first, first + count)]


def chat(*texts: str, system: str | None = None) -> Row:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def chats(count: int, first: int = 0) -> list[Row]:
    return [chat(question(n), f"There are {4 * n + 2} now.") for n in range(first, first + count)]


def pairs(count: int, **more: Any) -> list[Row]:
    return [{"prompt": question(n), "chosen": f"{4 * n + 2}.", "rejected": f"{4 * n}, I think.", **more} for n in range(count)]


def judged(count: int, label: bool | None = None) -> list[Row]:
    return [
        {"prompt": question(n), "completion": f"{4 * n + 2}.", "label": bool(n % 2) if label is None else label}
        for n in range(count)
    ]


SOUND: Mapping[str, Callable[[int], list[Row]]] = {
    "grpo": problems,
    "ppo": problems,
    "distillation": problems,
    "sft": chats,
    "dpo": pairs,
    "rm": pairs,
    "kto": judged,
    "eval": problems,
}


def write(path: str, rows: Sequence[Row | str]) -> str:
    Path(path).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def check(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(tmp_path)

    def run(
        kind: str,
        rows: Sequence[Row | str],
        *overrides: str,
        validation: Sequence[Row] = (),
        against: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> DataReport:
        section = "dpo" if kind == "kto" else kind
        model = str(tiny_model_folder)
        train = write("train.jsonl", rows)
        values: dict[str, Any] = {
            "policy": {"model_name": model, "max_total_sequence_length": 400},
            "data": {"train": {"dataset_name": train}},
        }
        if kind in ("grpo", "ppo", "distillation", "eval"):
            values["env"] = {"math": {"type": "math"}}
        if kind == "eval":
            values = {"generation": {"model_name": model}, "data": {"dataset_name": train}, "env": values["env"]}
        if kind == "kto":
            values["algorithm"] = {"name": "kto"}
        if validation:
            values["data"]["validation"] = {"dataset_name": write("validation.jsonl", validation)}
        if kind == "distillation":
            values["teacher"] = {"model_name": model}
        root: Any = TRAINING_RUNS.get(section, EvalRunConfig)
        config = load_config(None, list(overrides), root=root, values=values, check=False).config
        return check_data(config, DataCheckOptions(against=against, **(options or {})))

    return run


def found(report: DataReport) -> dict[str, int]:
    """The checks that found something, and how many rows."""
    return {finding.check: finding.count for finding in report.findings}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_data_has_no_findings(check: Check, kind: str) -> None:
    report = check(kind, SOUND[kind](30))
    assert report.status == "ok" and not list(report.findings)
    (entry,) = report.entries
    assert (entry.rows, entry.looked_at, entry.usable) == (30, 30, 30)
    assert entry.prompt is not None and 40 < entry.prompt.median <= entry.prompt.p95 <= entry.prompt.longest
    assert (entry.completion is None) == (SOUND[kind] is problems)


WITHOUT_SYSTEM = (
    "{% for message in messages if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETTING = (  # as templates that leave out what was thought before the last question
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] if not loop.last else message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + (' ' + message['name'] if message['name'] else '') }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = "word " * 500
NO_TESTS = {"text": "Write a function that adds.", "test_list": [], "test_setup_code": ""}
TESTS = [{"text": f"Add {n}.", "test_list": [f"assert add(1) == {n + 1}"], "test_setup_code": ""} for n in range(5)]

FAULTS: Mapping[str, tuple[str, list[Row | str], tuple[str, ...], dict[str, int], str]] = {
    # what is planted: (kind of run, rows, overrides, what is found, words of the finding)
    "a line that is no JSON": ("sft", [*chats(5), '{"messages": ['], (), {"unreadable": 1}, "is not JSON"),
    "a missing column": ("grpo", [*problems(5), {"problem": "2+2?"}], (), {"unreadable": 1}, "has no key 'answer'"),
    "an unknown role": ("sft", [*chats(5), {"messages": [{"role": "narrator", "content": "x"}]}], (), {"unreadable": 1}, "unknown role"),
    "half of a character": (
        "sft", [*chats(5), '{"messages": [{"role": "user", "content": "\\ud83d"}]}'], (), {"unreadable": 1}, "lone surrogate"
    ),
    "equal completions": ("dpo", [*pairs(5), {"prompt": "?", "chosen": "a", "rejected": "a"}], (), {"unreadable": 1}, "are equal"),
    "a margin below 0": ("dpo", [*pairs(5, margin=1), *pairs(6, margin=-1)[5:]], (), {"unreadable": 1}, "the margin is"),
    "a problem without tests": ("grpo", [*TESTS, NO_TESTS], ("env.math.type=code",), {"unreadable": 1}, "test"),
    "a long prompt": ("grpo", [*problems(5), {"problem": LONG, "answer": "1"}], (), {"too_long": 1}, "more than 399 tokens"),
    "a prompt over its own limit": (
        "grpo", problems(5), ("data.max_input_seq_length=20",), {"too_long": 5}, "(data.max_input_seq_length)"
    ),
    "a long conversation": ("sft", [*chats(5), chat("Hi", LONG)], (), {"too_long": 1}, "more than 400 tokens"),
    "a long completion": (
        "dpo", [*pairs(5), {"prompt": "?", "chosen": "a", "rejected": LONG}], (), {"too_long": 1}, "more than 400 tokens"
    ),
    "an empty question": ("grpo", [*problems(5), {"problem": " ", "answer": "1"}], (), {"empty": 1}, "is empty; a row needs a question"),
    "an empty reply": ("sft", [*chats(5), chat("Hi", "", "Are you there?", "Yes")], (), {"empty": 1}, "a reply is empty"),
    "an empty completion": ("dpo", [*pairs(5), {"prompt": "Hi", "chosen": "", "rejected": "a"}], (), {"empty": 1}, "a reply is empty"),
    "no reference answer": ("grpo", [*problems(5), {"problem": "2+2?", "answer": ""}], (), {"answer": 1}, "there is no reference answer"),
    "a reply that the template opens otherwise than it renders it": (
        "sft", [*chats(5), {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "name": "Bo", "content": "Hello"}]}],
        (f"policy.tokenizer.chat_template={json.dumps(NAMING)}",), {"template": 1}, "opens message 2 with"
    ),
    "a thought that the template drops": (
        "sft", [*chats(5), chat("Hi", "<think>Hm</think>Hello")],
        (f"policy.tokenizer.chat_template={json.dumps(FORGETTING.replace('loop.last', 'false'))}",),
        {"rewritten": 1}, "drops or rewrites the text of messages by 'assistant'"
    ),
    "a text that the template drops": (
        "sft", [*chats(5), chat("Hi", "Hello", system="Be brief.")], (f"policy.tokenizer.chat_template={json.dumps(WITHOUT_SYSTEM)}",),
        {"rewritten": 1}, "drops or rewrites the text of messages by 'system'"
    ),
    "a row twice": ("sft", [*chats(5), *chats(1)], (), {"duplicate": 1}, "an earlier row again: 1 row"),
    "a row in other letters": (
        "grpo", [*problems(5), {"problem": question(2).upper(), "answer": "10"}], (), {"duplicate": 1}, "(0 to the letter"
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(check: Check, planted: str) -> None:
    kind, rows, overrides, expected, words = FAULTS[planted]
    report = check(kind, rows, *overrides)
    assert found(report) == expected
    assert any(words in finding.message for finding in report.findings)
    if len(rows) == 6:  # the last one was planted
        assert all(finding.examples[0].location == "train.jsonl:6" for finding in report.findings)
    lost = sum(finding.count for finding in report.findings if finding.severity == "error" and finding.check != "template")
    assert report.entries[0].usable <= len(rows) - lost


def test_a_thought_that_the_template_drops_later_is_no_fault(check: Check) -> None:
    rows = [*chats(5), chat("Hi", "<think>Hm</think>Hello", "2+2?", "4")]
    report = check("sft", rows, f"policy.tokenizer.chat_template={json.dumps(FORGETTING)}")
    assert not [*report.findings] and report.entries[0].usable == 6


@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo"])
def test_questions_of_the_validation_data_are_found_in_the_training_data(check: Check, kind: str) -> None:
    report = check(kind, SOUND[kind](10), validation=SOUND[kind](12)[8:])
    (finding,) = report.findings
    assert (finding.check, finding.count, finding.examples[0].location) == ("overlap", 2, "validation.jsonl:1")
    assert "2 of 4 questions of data.validation (validation.jsonl) are trained on" in finding.message


def test_what_is_held_out_is_not_trained_on(check: Check) -> None:
    report = check("sft", [*chats(20), *chats(20)], "data.train.split_validation_size=0.2")
    assert [entry.key for entry in report.entries] == ["data.train", "data.train (held out)"]
    assert set(found(report)) == {"duplicate"}


def test_questions_of_an_evaluation_are_found_in_the_training_data(check: Check) -> None:
    asked = "A train leaves at noon and travels north at sixty miles an hour. When has it gone two hundred and ten miles?"
    evaluation = write("evaluation.jsonl", [{"problem": asked, "answer": "3:30"}, *problems(3, first=50)])
    report = check("sft", [*chats(20), chat(f"Please help: {asked.upper()}", "At half past three.")], against=[evaluation])
    (finding,) = report.findings
    assert (finding.check, finding.count, finding.severity) == ("contamination", 1, "error")
    assert (finding.examples[0].location, finding.examples[0].text) == ("train.jsonl:21", "shares 100% of evaluation.jsonl:1")


def test_rows_of_two_entries_are_compared(check: Check) -> None:
    two = [write("one.jsonl", chats(6)), write("two.jsonl", chats(6, first=4))]
    report = check("sft", chats(1), f"data.train=[{{dataset_name: {two[0]}}}, {{dataset_name: {two[1]}}}]")
    assert [(entry.key, [finding.message for finding in entry.findings]) for entry in report.entries] == [
        ("data.train.0", []),
        ("data.train.1", ["also in data.train.0: 2 rows"]),
    ]


def test_of_a_stream_the_first_rows_are_looked_at(check: Check) -> None:
    rows = [*chats(30), "{", *chats(1), *chats(20, first=50)]
    (entry,) = check("sft", rows, "data.train.streaming=true", options={"rows": 40}).entries
    assert {finding.check: finding.examples[0].location for finding in entry.findings} == {
        "unreadable": "train.jsonl:31",
        "duplicate": "train.jsonl:32",
    }
    assert entry.rows is None and entry.looked_at == 40
    assert entry.notes == ["it is streamed: the first 40 rows were looked at (--rows N looks at more)"]


def test_generated_tasks_may_look_alike(check: Check) -> None:
    report = check(
        "grpo", [], "data.train={dataset_name: null, size: 1500}", "env.math.type=arithmetic", "env.math.max_operand=3"
    )
    assert report.status == "ok" and report.entries[0].looked_at == 1000
    assert report.entries[0].notes == ["the first 1,000 of 1,500 generated tasks were looked at (--rows N looks at others)"]


def test_without_the_tokenizer_the_texts_are_still_looked_at(check: Check) -> None:
    report = check("sft", [*chats(5), *chats(1)], "policy.model_name=no/model", "policy.tokenizer.name=no/model")
    assert set(found(report)) == {"duplicate"} and report.entries[0].prompt is None
    assert any("tokens and the chat template were not looked at" in note for note in report.notes)


def test_data_that_cannot_be_opened_is_said_beside_what_can(check: Check) -> None:
    report = check("sft", chats(5), "data.validation={dataset_name: gone.jsonl}")
    assert report.status == "unchecked" and report.entries[0].usable == 5
    assert "there is no data file 'gone.jsonl'" in str(report.entries[1].error)


def test_rows_of_a_class_are_checked_too(check: Check) -> None:
    Path("mine.py").write_text(
        "def rows(n):\n    return [{'prompt': f'What is {i}?', 'completion': i and str(i)} for i in range(n)] + [{}]\n"
    )
    report = check("sft", [], "data.train={dataset_name: mine.py:rows, dataset_kwargs: {n: 6}}")
    assert found(report) == {"unreadable": 1}
    assert [finding.examples[0].location for finding in report.findings] == ["mine.py:rows, row 7"]


def test_all_faults_at_once_have_the_report_that_is_kept(check: Check) -> None:
    """``tests/golden/data_check.txt`` is the report; delete it, and the test writes it again."""
    asked = "A train leaves at noon and travels north at sixty miles an hour. When has it gone two hundred and ten miles?"
    write("evaluation.jsonl", [{"problem": asked, "answer": "3:30"}])
    planted = [
        row
        for kind, rows, overrides, _, _ in FAULTS.values()
        if kind == "sft" and len(rows) == 6 and not overrides
        for row in rows[5:]
    ]
    rows = [
        *chats(30),
        *planted,
        chat(asked, "At half past three."),
        chat("A red \u202e text", "It is \x1b[31mred."),
        chat("Hi", "Hello", system="Be brief."),
    ]
    overrides = (f"policy.tokenizer.chat_template={json.dumps(WITHOUT_SYSTEM)}",)
    report = check("sft", rows, *overrides, validation=chats(3, first=28), against=["evaluation.jsonl"])
    text = format_report(report) + "\n"
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert all(character.isprintable() for character in text.replace("\n", "")) and report.status == "error"


def test_images_are_read_and_tell_equal_questions_apart(check: Check, tmp_path: Path) -> None:
    """Of a model that reads images; for one of text each row is an error of the template."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(draw_image(ord(name)))
    rows = [{"problem": "How many?", "answer": str(n), "image": f"{name}.png"} for n, name in enumerate(("a", "b", "gone"))]
    model = save_vision_model("qwen2_5_vl", tmp_path / "vlm")
    report = check("grpo", [*rows, {**rows[0], "answer": "5"}], f"policy.model_name={model}")
    assert found(report) == {"image": 1}
    assert "gone.png cannot be read" in next(each.message for each in report.findings if each.check == "image")
    assert found(check("grpo", rows))["template"] == 3
