"""Images of records: from columns of every form to references in their places in messages."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

from strop.data.messages import make_prompt, parse_messages
from strop.data.prompt_template import PromptTemplate
from strop.data.sources.image_columns import IMAGES, ImageColumns, write_data_url
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.types import Image, Message, assistant

PNG = b"\x89PNG made up"
URL = write_data_url(PNG)


def read(record: dict, **columns: str) -> list[str]:
    return ImageColumns(**columns).read(record, "row 1")[IMAGES]


def test_bytes_paths_addresses_and_opened_images_become_references() -> None:
    from PIL import Image as Pillow

    opened, file = Pillow.new("RGB", (2, 2)), io.BytesIO()
    opened.save(file, format="PNG")
    values = [PNG, {"bytes": PNG, "path": "a.png"}, {"bytes": None, "path": "a.png"}, "a.png", "https://x.org/a.png", opened]
    assert read({"images": values}) == [URL, URL, "a.png", "a.png", "https://x.org/a.png", write_data_url(file.getvalue())]
    assert f"data:image/png;base64,{base64.b64encode(PNG).decode()}" == URL
    assert write_data_url(b"\xff\xd8x").startswith("data:image/jpeg;") and write_data_url(b"?").startswith("data:application/")


def test_one_image_is_a_list_of_one_and_none_is_an_empty_list() -> None:
    assert read({"image": "a.png"}) == ["a.png"] and read({"image": None}) == [] and read({"images": [None, PNG]}) == [URL]
    assert read({"picture": {"of_it": "scan-7"}}, key="picture.of_it") == ["scan-7"]


@pytest.mark.parametrize("value", ["ubuntu:24.04", 3, {"name": "x"}, ["a.png", 3]])
def test_a_column_that_is_named_like_one_of_images_and_holds_others_is_no_column_of_images(value: object) -> None:
    assert ImageColumns().read({"image": value}, "row 1") == {"image": value}


def test_a_column_that_is_named_must_be_there_and_hold_images() -> None:
    with pytest.raises(DataError, match=r"row 1 has no column 'picture', which image_key names; it has \['image'\]"):
        read({"image": PNG}, key="picture")
    with pytest.raises(DataError, match=r"row 1: 'picture' has the image 3; write a path, an address"):
        read({"picture": 3}, key="picture")


def test_relative_paths_start_from_their_folder(tmp_path: Path) -> None:
    part = {"type": "image", "image": "b.png"}
    record = {"image": ["a.png", "/c.png", URL], "messages": [{"role": "user", "content": [part]}]}
    placed = ImageColumns(folder="/media").read(record, "row 1")
    assert placed[IMAGES] == ["/media/a.png", "/c.png", URL]
    assert placed["messages"][0]["content"] == [{"type": "image", "image": "/media/b.png"}]
    (tmp_path / "a.png").write_bytes(PNG)
    assert read({"image": ["a.png", "gone.png"]}, beside=str(tmp_path)) == [str(tmp_path / "a.png"), "gone.png"]


def test_images_of_a_json_lines_file_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    row = {"problem": "What is it?", "answer": "a cat", "image": "cat.png"}
    text = {"problem": "1 + 1?", "answer": "2"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (text, row)))
    rows = DataSource(dataset_name=str(path)).load_rows()
    assert [row.images for row in rows] == [(), (str(tmp_path / "cat.png"),)]
    assert rows[1].metadata == {"problem": "What is it?", "answer": "a cat"}
    streamed = DataSource(dataset_name=str(path), streaming=True, shuffle_buffer=2).load_rows()
    assert [streamed[position].images for position in (0, 1)] == [row.images for row in rows]


def test_images_of_the_library_datasets_keep_their_bytes() -> None:
    import datasets

    features = datasets.Features(
        {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    rows = datasets.Dataset.from_list(
        [{"images": [{"bytes": PNG, "path": None}], "problem": "What?", "answer": "x"}], features=features
    )
    (row,) = DataSource(rows=rows).load_rows()
    assert row.images == (URL,)  # which is no image that PIL would open


def test_a_question_has_its_images_where_it_has_places_for_them() -> None:
    template = PromptTemplate("Look: ", " Think.", "Be brief.")
    (_, asked) = make_prompt("Is <image> like <image_2>?", template, "row 1", ["a.png", "b.png"])
    assert asked.shown_content == "Look: Is [image: a.png] like [image: b.png]? Think."
    for question in ("Which one?", "<image>Which one?"):
        (_, asked) = make_prompt(question, template, "row 1", ["a.png"])
        assert asked.shown_content == "[image: a.png]Look: Which one? Think."  # before the prompt, as in NeMo-RL
    (_, asked) = make_prompt("What does <image> mean in HTML?", template, "row 1")
    assert asked.content == "Look: What does <image> mean in HTML? Think." and not asked.images


@pytest.mark.parametrize(
    ("question", "message"),
    [("<image> and <image>", "row 1 has more places <image> than the record has images, which are 1"), ("", "row 1 is empty")],
)
def test_a_question_with_more_places_than_images_or_none_of_both_is_an_error(question: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_prompt(question, PromptTemplate(), "row 1", ["a.png"] if question else [])


def test_a_question_with_fewer_places_than_images_is_an_error() -> None:
    with pytest.raises(DataError, match=r"row 1 has places for all but 1 of the images of the record"):
        make_prompt("Is <image> it?", PromptTemplate(), "row 1", ["a.png", "b.png"])


def test_messages_take_the_images_of_the_record_in_order_also_from_texts() -> None:
    messages = [
        {"from": "human", "value": "<image>\nA cat?"},
        {"from": "gpt", "value": "Yes."},
        {"from": "human", "value": "And <image>?"},
    ]
    parsed = parse_messages(messages, "row 1", ["a.png", {"bytes": PNG}])
    assert parsed[0] == Message("user", "\nA cat?", images=(Image("a.png", position=0),))
    assert parsed[2] == Message("user", "And ?", images=(Image(URL, position=4),))


def test_images_without_a_place_come_before_the_users_first_message() -> None:
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    assert parse_messages(messages, "row 1", ["a.png", "b.png"])[1] == Message(
        "user", "Which?", images=(Image("a.png"), Image("b.png"))
    )


@pytest.mark.parametrize("kind", ["audio", "input_audio", "video", "video_url"])
def test_audio_and_video_are_refused_with_one_sentence(kind: str) -> None:
    part = {"type": kind, kind: "a.bin"}
    with pytest.raises(DataError, match=f"has a part of the type {kind!r}: audio and video cannot be trained on in this version"):
        parse_messages([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}], "row 1")


def test_a_record_whose_text_has_a_place_for_its_video_is_refused_and_one_without_is_not() -> None:
    with pytest.raises(DataError, match=r"row 1 has the column 'video' and a place for it in a text"):
        ImageColumns().read({"video": "a.mp4", "conversations": [{"from": "human", "value": "<video> What?"}]}, "row 1")
    assert ImageColumns().read({"video": "https://x.org", "problem": "1 + 1?"}, "row 1")["problem"] == "1 + 1?"


def test_recorded_answers_and_preferences_have_the_images_of_their_record() -> None:
    examples = pytest.importorskip("strop.extensions.recorded.examples")
    conversations, preferences = examples.conversations, examples.preferences
    (example,) = conversations(DataSource(rows=[{"prompt": "What?", "completion": "A cat.", "image": PNG, "source": "x"}]))
    assert example.messages == (Message("user", "What?", images=(Image(URL),)), assistant("A cat.")) and example.metadata == {
        "source": "x"
    }
    (pair,) = preferences(DataSource(rows=[{"prompt": "What?", "chosen": "A cat.", "rejected": "A dog.", "images": ["a.png"]}]))
    assert pair.prompt == (Message("user", "What?", images=(Image("a.png"),)),)
    prompt = [{"role": "user", "content": "<image>What?"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("A cat.", "A dog."))
    (pair,) = preferences(DataSource(rows=[{"prompt": prompt, "chosen": chosen, "rejected": rejected, "images": ["a.png"]}]))
    assert pair.prompt[0].images == (Image("a.png"),) and not pair.chosen[0].images


def test_equal_questions_about_other_images_may_be_on_both_sides_of_a_split() -> None:
    rows = [{"problem": "How many?", "answer": str(n), "image": f"{n}.png"} for n in range(40)]
    parts = [DataSource(rows=rows, split_validation_size=0.25, part=part).load_rows() for part in ("train", "validation")]
    assert all(parts) and sorted(int(row.answer) for part in parts for row in part) == list(range(40))
