"""Evaluation questions in training texts: what is found, what is not, and what it costs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.extensions.evaluation.overlap import BATCH_TOKENS, OverlapReport, QuestionIndex, find_overlaps, normalize_text

EGGS = "Janet's ducks lay 16 eggs per day. She eats three for breakfast and bakes muffins with four. How many are left?"
PRIMES = "Find the number of primes p below 1,000 such that $p^2 + 2$ is prime as well, and give the largest of them."


def search(*texts: str, questions: tuple[str, ...] = (EGGS, PRIMES, "What is 3+4?"), **options: float) -> OverlapReport:
    return find_overlaps(
        [(f"eval:{index}", text) for index, text in enumerate(questions)],
        [(f"train:{index}", text) for index, text in enumerate(texts)],
        **options,  # type: ignore[arg-type]
    )


def found(report: OverlapReport) -> dict[str, tuple[int, int]]:
    return {each.question: (each.exact, each.partial) for each in report.found}


def test_case_punctuation_and_markup_do_not_hide_a_question() -> None:
    report = search(EGGS.upper(), "  what is $3 + 4$", "find the number of primes \\(p\\) below 1000, such that "
                    "p^2+2 is prime as well, and give the largest of them")  # fmt: skip
    assert found(report) == {"eval:0": (1, 0), "eval:1": (1, 0), "eval:2": (1, 0)}
    assert (report.exact, report.share, report.texts, report.texts_found) == (3, 1.0, 3, 3)
    assert report.found[1].closest[0].text == "train:2"


def test_numbers_and_operators_count() -> None:
    assert found(search("What is 3+5?", "What is 3*4?", "What is 3-4?", "What is 34?")) == {}
    assert normalize_text("1,234.50 (1,2) x-1 well-known ½") == ["1234.50", "1", "2", "x", "-", "1", "well", "known", "1", "2"]


def test_a_question_inside_a_longer_text_is_found_with_its_share() -> None:
    report = search(f"Solve this and think step by step. {EGGS} She sells the rest.", "unrelated")
    assert found(report) == {"eval:0": (0, 1)}
    (pair,) = report.found[0].closest
    assert (pair.text, pair.exact, pair.shared) == ("train:0", False, 1.0)


def test_much_of_a_question_is_found_and_a_common_phrase_is_not() -> None:
    other_end = EGGS.partition("How many")[0] + "What does she earn from the remainder at two dollars?"
    (most,) = search(other_end).found
    assert 0.5 < most.closest[0].shared < 1
    assert found(search(other_end, threshold=0.9)) == {}
    assert found(search("Janet's ducks lay 16 eggs per day. Bob has two cats and a dog. How many are left?")) == {}
    assert found(search("Find the number of primes p below 1000 such that it ends in 7.", ngram=8, threshold=0.1)) == {
        "eval:1": (0, 1)
    }


def test_short_questions_are_found_where_they_are_the_text_only() -> None:
    assert found(search("What is 3+4? And what is 3+4+5?")) == {}
    eight = "How many dogs does Bob own at home?"
    assert found(search(f"Bob again. {eight}", questions=(eight,))) == {"eval:0": (0, 1)}


def test_a_template_that_many_questions_share_is_not_contamination() -> None:
    template = "Answer the following question with a single letter and say nothing else at all please. "
    questions = tuple(f"{template} Which option names the animal number {index} of list {index * 7}?" for index in range(40))
    assert found(search(f"{template} Is water wet?", questions=questions)) == {}
    assert found(search(questions[3], questions=questions)) == {"eval:3": (1, 0)}
    assert found(search(template, questions=(template,) * 40)).keys() == {f"eval:{index}" for index in range(40)}


def test_the_closest_texts_are_kept_and_all_are_counted() -> None:
    near = EGGS.partition("How many")[0] + "What does she earn?"
    report = search(*[near] * 5, EGGS, *[near] * 5, f"{EGGS} Think.", keep=2)
    assert found(report) == {"eval:0": (1, 11)}
    assert [each.text for each in report.found[0].closest] == ["train:5", "train:11"]


def test_nothing_is_compared_with_nothing() -> None:
    assert found(search(questions=())) == {} and search("text", questions=()).share == 0
    assert found(search("", "?!", questions=("", "...", "?!"))) == {}  # nothing to compare
    with pytest.raises(ValueError, match="at least 1"):
        QuestionIndex([], ngram=0)


words = st.lists(st.sampled_from("abcdefg"), min_size=0, max_size=25)


@given(st.lists(words, max_size=5), st.lists(words, max_size=6), st.integers(1, 9))
def test_shares_are_those_of_sets_of_ngrams(questions: list[list[str]], texts: list[list[str]], ngram: int) -> None:
    """The same with sets of tuples."""

    def grams(tokens: list[str], length: int) -> set[tuple[str, ...]]:
        return {tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)}

    expected = {}
    for q, question in enumerate(questions):
        length = min(len(question), ngram)
        mine = grams(question, length) if length >= min(8, ngram) else set()
        for t, text in enumerate(texts):
            share = 1.0 if text == question else len(mine & grams(text, length)) / len(mine) if mine else 0.0
            if question and share >= 0.3:
                expected[q, t] = share
    index = QuestionIndex(((str(q), " ".join(each)) for q, each in enumerate(questions)), ngram=ngram)
    pairs = index.search(((str(t), " ".join(each)) for t, each in enumerate(texts)), threshold=0.3)
    assert {(int(each.question), int(each.text)): each.shared for each in pairs} == pytest.approx(expected)


def test_batches_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [EGGS, f"{PRIMES} Hm. {EGGS}", "nothing", *[f"row {index}" for index in range(50)], PRIMES]
    whole = search(*texts)
    monkeypatch.setattr("strop.extensions.evaluation.overlap.BATCH_TOKENS", 1)
    assert search(*texts) == whole and found(whole) == {"eval:0": (1, 1), "eval:1": (1, 1)}


def test_memory_does_not_grow_with_the_training_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.extensions.evaluation.overlap.BATCH_TOKENS", BATCH_TOKENS // 8)
    random_words = [f"w{number}" for number in random.Random(0).choices(range(5000), k=20_000)]

    def rows(count: int) -> Iterator[tuple[str, str]]:
        for index in range(count):
            start = index * 37 % 19_900
            yield f"row {index}", " ".join(random_words[start : start + 40])

    peaks = []
    for count in (500, 2_000):
        tracemalloc.start()
        find_overlaps([("q", EGGS), *rows(200)], rows(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
