"""Every built-in set, by its name, read from rows with the schema that it has on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.data.builtin_dataset import BuiltinDataset
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.sources.in_memory import ListRecords
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError
from strop.data.sources.row_readers import keeps_row, read_rows
from strop.data.sources.source import DataSource
from strop.extensions.recorded.examples import conversations, preferences, unpaired_preferences
from strop.extensions.recorded.recorded_sets import PREFERENCE_SETS, TREE_SYSTEM_PROMPT
from strop.types import assistant, system, user
from support.sweep import one_in

pytestmark = pytest.mark.usefixtures("local_hub")

PROBLEM = "Find the positive root of $x^2 = 9$."
SOLUTION = "We have $x = \\pm 3$, so the root is $\\boxed{3}$."
ASK, GOOD, BAD = user("What is 12 + 7?"), assistant("19"), assistant("20")
DAPO = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer"


MEDIA = Path(__file__).parents[2] / "fixtures" / "media"


def splits_of(entry: BuiltinDataset) -> list[str]:
    splits = (entry.splits.train, entry.splits.validation, entry.splits.evaluation)
    return [split for split in dict.fromkeys(splits) if split is not None]


def test_every_built_in_set_has_rows_of_its_schema_here() -> None:
    without = sorted(name for name, entry in BUILTIN_DATASETS.items() if find_copy(entry.hub) is None)
    assert without == [], f"write rows of {without} to tests/fixtures/hub"


@pytest.mark.parametrize("name", one_in(3, BUILTIN_DATASETS))
def test_every_split_that_an_entry_names_can_be_read(name: str) -> None:
    for split in splits_of(BUILTIN_DATASETS[name]):
        folder = str(MEDIA) if BUILTIN_DATASETS[name].media_files else None
        _, records = DataSource(dataset_name=name, split=split, media_data_dir=folder).open_records()
        assert len(records) and records[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OpenMathInstruct-2", [(PROBLEM, "3")]),
        ("DeepScaler", [(PROBLEM, "3")]),
        ("DAPOMath17K", [(f"{DAPO}\n\n{PROBLEM}", "3")]),
        ("OpenR1-Math-220k", [(PROBLEM, "3")]),
        ("NuminaMath-1.5", [(PROBLEM, "3"), ("Which letter?", "B"), ("Of no type?", "7")]),
        ("MATH-lighteval", [(PROBLEM, "3"), ("What is half of one?", "\\frac{1}{2}"), ("What is 2 + 3?", "5")]),
        ("Big-Math-RL-Verified", [(PROBLEM, "3")]),
        ("DeepMath-103K", [(PROBLEM, "3")]),
        ("ORZ-Math-72k", [(PROBLEM, "3")]),
        ("Polaris-Dataset-53K", [(PROBLEM, "3")]),
        (
            "gsm8k",
            [
                ("Ann has 5 apples and eats 2. How many are left?", "3"),
                ("A box holds 1200 pens. How many do 2 boxes hold?", "2,400"),
            ],
        ),
    ],
)
def test_problems_and_their_answers_are_those_of_nemo_rl_also_as_conversations(
    name: str, expected: list[tuple[str, str]]
) -> None:
    """NeMo-RL makes two messages of each row: the problem by the user, and the answer, not the solution, by the assistant."""
    rows = DataSource(dataset_name=name).load_rows()
    assert [(row.question, row.answer) for row in rows] == expected
    examples = conversations(DataSource(dataset_name=name))
    assert [example.messages for example in examples] == [(user(question), assistant(answer)) for question, answer in expected]


def test_rows_that_are_left_out_keep_the_places_of_the_others() -> None:
    rows = DataSource(dataset_name="NuminaMath-1.5").load_rows()
    assert [row.id for row in rows] == [f"AI-MO/NuminaMath-1.5:{index}" for index in (0, 7, 8)]
    held = [
        DataSource(dataset_name="NuminaMath-1.5", split_validation_size=1, part=part).load_rows()
        for part in ("train", "validation")
    ]
    assert sorted(row.id for rows in held for row in rows) == [row.id for row in rows]
    assert len(DataSource(dataset_name="NuminaMath-1.5", size=2).load_rows()) == 2


def test_rows_of_which_none_is_left_are_an_error_that_says_what_they_had_to_be() -> None:
    entry, answer = BUILTIN_DATASETS["NuminaMath-1.5"], {"answer": "proof", "question_type": "proof"}
    assert not keeps_row(entry.keep, answer)
    with pytest.raises(DataError, match=r"none of the 1 rows .* can be used: answer must not be '' or 'proof' or 'notfound'"):
        DataSource(rows=[answer], rows_of=entry).load_rows()


def test_a_solution_without_an_answer_is_an_error_that_names_the_row() -> None:
    rows = [{"problem": PROBLEM, "solution": "The root is 3."}]
    with pytest.raises(DataError, match=r"row 1: 'solution' has no answer in \\boxed"):
        DataSource(rows=rows, rows_of=BUILTIN_DATASETS["MATH-lighteval"]).load_rows()


TURNS = (user("Hello"), assistant("Hello, how can I help?"), ASK, GOOD)
TREE = system(TREE_SYSTEM_PROMPT)
TREES = [
    (TREE, user("Say hello."), assistant("Hello."), user("And in French?"), assistant("Bonjour.")),
    (TREE, user("Say hello."), assistant("Hello.")),  # and thanks, to which nobody replied
    (TREE, user("Say hello."), assistant("Hi.")),
]
THOUGHT = assistant("<think>3 * 3 is 9.</think>\\boxed{3}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "squad",
            [
                (
                    system("Oslo is the capital of Norway. It was founded around 1040."),
                    user("When was Oslo founded?"),
                    assistant("around 1040"),
                )
            ],
        ),
        ("tulu3_sft_mixture", [TURNS]),
        ("open_assistant", TREES),
        ("Nemotron-Cascade-2-SFT-Math", [(system("You are a helpful assistant."), user(PROBLEM), THOUGHT)]),
        ("Nemotron-Post-Training-Dataset-v1", [(user(PROBLEM), assistant(SOLUTION))] * 4),
        ("Nemotron-Post-Training-Dataset-v2", [(user(PROBLEM), assistant(SOLUTION))] * 4),
        ("Llama-Nemotron-Post-Training-Dataset", [(system("detailed thinking off"), user(PROBLEM), assistant(SOLUTION))] * 5),
        ("ultrachat_200k", [TURNS]),
        ("Capybara", [TURNS]),
        ("smoltalk", [TURNS]),
        ("tldr", [(user("SUBREDDIT: r/x\n\nTITLE: T\n\nPOST: It rains.\n\nTL;DR:"), assistant(" It rains."))]),
        ("HelpSteer3", [(ASK, GOOD), (ASK, GOOD), (ASK, assistant("It is 19."))]),  # of a tie the first response
    ],
)
def test_conversations_are_those_of_nemo_rl(name: str, expected: list[tuple[object, ...]]) -> None:
    assert [example.messages for example in conversations(DataSource(dataset_name=name))] == expected


@pytest.mark.parametrize("name", PREFERENCE_SETS)
def test_preferences_are_those_of_nemo_rl(name: str) -> None:
    pairs = preferences(DataSource(dataset_name=name))
    opening = (user("Hi."), assistant("Hello!")) if name == "hh-rlhf" else ()
    expected = [((*opening, ASK), (GOOD,), (BAD,))] * (2 if name == "HelpSteer3" else 1)  # HelpSteer3 without its tie
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in pairs] == expected
    assert [pair.margin for pair in pairs] == ([2.0, 1.0] if name == "HelpSteer3" else [None])
    assert [each.desirable for each in unpaired_preferences(DataSource(dataset_name=name))] == [True, False] * len(pairs)


def test_helpsteer3_asks_for_the_preferred_response() -> None:
    """As its processor for GRPO: the context is the prompt, and the preferred response what the environment compares with."""
    rows = DataSource(dataset_name="HelpSteer3", split="train").load_rows()
    assert [(row.prompt, row.answer) for row in rows] == [((ASK,), "19"), ((ASK,), "19"), ((ASK,), "It is 19.")]


def test_the_whole_solution_is_trained_on_where_its_column_is_named() -> None:
    (example,) = conversations(DataSource(dataset_name="OpenMathInstruct-2", output_key="generated_solution"))
    assert example.messages == (user(PROBLEM), assistant(SOLUTION))
    (chat,) = conversations(DataSource(dataset_name="OpenR1-Math-220k", messages_key="messages"))
    assert chat.messages == (user(PROBLEM), THOUGHT)
    whole = conversations(DataSource(dataset_name="openai/gsm8k", subset="main", input_key="question"))
    assert whole[0].answer == "5 - 2 = <<5-2=3>>3 apples.\n#### 3"


def test_other_subsets_and_splits_are_those_of_the_hub() -> None:
    assert DataSource(dataset_name="gsm8k", subset="socratic").load_rows()[0].answer == "3"
    assert DataSource(dataset_name="OpenR1-Math-220k", subset="extended").load_rows()[0].answer == "3"
    assert DataSource(dataset_name="OpenMathInstruct-2", split="train_5M").load_rows()[0].answer == "3"
    assert len(conversations(DataSource(dataset_name="Nemotron-Post-Training-Dataset-v2", split="math+multilingual_ja"))) == 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"prompt": {"text": "Hi", "role": "bot", "replies": []}}, "row 1 is no tree of messages"),
        ({"prompt": {"text": None, "role": "prompter", "replies": []}}, "'text' is None, which is not text"),
    ],
)
def test_a_tree_that_is_none_is_an_error_with_its_line(tree: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        conversations(DataSource(rows=[tree], rows_of=BUILTIN_DATASETS["open_assistant"]))


def test_a_deep_tree_is_cut_without_recursion() -> None:
    node: dict[str, object] = {"text": "end", "role": "assistant", "replies": []}
    for depth in range(5000):
        node = {"text": "on", "role": ("prompter", "assistant")[depth % 2], "replies": [node]}
    (record,) = read_rows(BUILTIN_DATASETS["open_assistant"], ListRecords("trees", [{"prompt": node}]))
    assert len(record["messages"]) == 5002


def test_trees_that_nobody_replied_to_are_an_error() -> None:
    tree = {"prompt": {"text": "Nobody?", "role": "prompter", "replies": []}}
    with pytest.raises(DataError, match=r"none of the 1 rows of rows-\w+ can be used"):
        conversations(DataSource(rows=[tree], rows_of=BUILTIN_DATASETS["open_assistant"]))


def test_a_damaged_archive_of_trees_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "OpenAssistant/oasst1/2023-04-12_oasst_all.trees.jsonl.gz"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    for content in (b"not packed", b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"oasst_all\.trees\.jsonl\.gz"):
            conversations(DataSource(dataset_name="open_assistant"))
