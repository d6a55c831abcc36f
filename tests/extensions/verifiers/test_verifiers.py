"""What each verifier gives for what a model writes, hostile text included."""

from __future__ import annotations

import time

import pytest

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifier_registry import list_verifiers, make_verifier
from strop.thoughts import read_answer
from strop.types import Message, ToolCall, assistant, user

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think> 4", " 4"),
        ("hm</think>4", "4"),
        ("<think>never ends", ""),
        ("first <think>never ends", "first "),
        ("</think>a</think>b", "b"),
        ("plain", "plain"),
        ("<think>a</think>b<think>c", "b"),
    ],
)
def test_thoughts_are_left_out(text, answer):
    assert read_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer", "options", "right"),
    [
        (r"so \boxed{\frac{2}{4}}", "0.5", {}, 1),
        ("<think>\\boxed{3}</think>\\boxed{4}", "3", {}, 0),
        ("Answer: 12", "12", {"method": "dapo"}, 1),
        ("<answer>7</answer>", "7", {"tag": "answer", "method": "exact"}, 1),
        ("7", "7", {"tag": "answer"}, 0),
        ("Antwort: 42", "42", {"method": "multilingual"}, 1),
        ("答案：４２。", "42", {"method": "multilingual"}, 1),
        ("الإجابة: ٣٫٥", "3.5", {"method": "multilingual"}, 1),
        ("उत्तर: १,२३४", "1234", {"method": "multilingual"}, 1),
        ("উত্তর: ১২ টি", "12", {"method": "multilingual"}, 1),
        ("Réponse : **18**", "18", {"method": "multilingual"}, 1),
        ("Jibu: 19", "18", {"method": "multilingual"}, 0),
        (r"答案：\boxed{１/２}", "0.5", {"method": "multilingual"}, 1),
    ],
)
def test_math_is_compared_in_many_languages(value, text, answer, options, right):
    assert value("math", text, answer=answer, **options) == right


@pytest.mark.parametrize(
    ("text", "answer", "options", "right"),
    [
        ("I think. Answer: B", "B", {}, 1),
        (r"\boxed{C}", "C", {}, 1),
        ("(d)", "D", {}, 1),
        ("A bad idea", "A", {}, 0),
        ("Answer: B", "A", {}, 0),
        ("<think>Answer: A</think>Answer: B", "A", {}, 0),
        ("答案：Ｂ", "B", {"language": "multilingual"}, 1),
        ("الإجابة: ج", "C", {"language": "multilingual"}, 1),
        ("", "A", {}, 0),
    ],
)
def test_a_letter_is_chosen(value, text, answer, options, right):
    assert value("multiple_choice", text, answer=answer, **options) == right


def test_texts_match_as_squad_compares_them(value):
    assert value("exact_match", "The Eiffel  Tower!", answer="eiffel tower") == 1
    assert value("exact_match", "The Eiffel Tower", answer="eiffel tower", normalize="space") == 0
    assert value("exact_match", "ß", answer="SS", normalize="case") == 1
    assert value("exact_match", "b", references="aliases", row={"aliases": ["a thing", "B"]}) == 1
    assert value("f1", "the big red dog", answer="red dog") == pytest.approx(2 * 2 / (3 + 2))
    assert value("f1", "cat", answer="dog") == 0 == value("f1", "", answer="dog")
    assert value("f1", "x y", references="a.b", row={"a": {"b": ["q", "x"]}}) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="nothing in its column 'aliases'"):
        value("exact_match", "b", references="aliases")


def test_similar_texts_are_compared_in_bounded_time(scored, value):
    assert value("fuzzy_match", "Massachusets", answer="Massachusetts") == pytest.approx(0.96)
    assert value("fuzzy_match", "Massachusets", answer="Massachusetts", threshold=0.9) == 1
    assert value("fuzzy_match", "tower eiffel", answer="Eiffel Tower", method="token_sort_ratio") == 1
    assert value("fuzzy_match", "it is Rome, I guess", answer="rome", method="partial_ratio") == 1
    assert value("fuzzy_match", "martha", answer="marhta", method="jaro_winkler") > 0.95
    started = time.perf_counter()
    long = scored("fuzzy_match", "a" * 5_000_000, answer="aaa", method="partial_ratio")
    assert (long.value, long.metrics) == (0.0, {"too_long": 1.0}) and time.perf_counter() - started < 20


def test_patterns_match_and_one_that_runs_for_ever_is_stopped_and_counted(scored, value):
    assert value("regex", "code: AB-12", pattern=r"[A-Z]{2}-\d{2}") == 1
    assert value("regex", "code: AB-12", pattern=r"[A-Z]{2}-\d{2}", match="fullmatch") == 0
    assert value("regex", "no way", pattern=r"sorry", negate=True) == 1
    assert value("regex", "it is 3.5", answer="3.5", pattern=r"it is {answer}$") == 1
    assert value("regex", "it is 395", answer="3.5", pattern=r"it is {answer}$") == 0
    assert value("regex", "a, b; c,", pattern=",", match="count") == 2
    assert value("regex", "!" * 50, pattern="!", match="count", at_most=3) == 0
    evil = scored("regex", "a" * 60 + "!", pattern=r"^(a+)+$", timeout_s=0.2)
    assert (evil.value, evil.metrics) == (0.0, {"unverified": 1.0})


def test_json_is_read_and_checked_under_a_schema(scored, value):
    assert value("json_schema", 'Sure:\n```json\n{"name": "Ann", "age": 3}\n```\n', json_schema=PERSON) == 1
    assert value("json_schema", '{"name": "Ann"}', json_schema=PERSON) == 1
    assert value("json_schema", '{"age": 3}', json_schema=PERSON) == 0
    assert value("json_schema", '{"age": 3}', json_schema=PERSON, credit="parsed") == 0.5
    assert value("json_schema", 'Sure: {"name": "Ann"}', json_schema=PERSON, credit="parsed") == 0
    assert value("json_schema", '{"name": "Ann"}', schema_key="s", row={"s": '{"required": ["name"]}'}) == 1
    for hostile in ("[" * 100_000, "NaN", '{"name": ' + "9" * 10_000 + "}", "", '{"a": 1} {"b": 2}'):
        assert value("json_schema", hostile, json_schema=PERSON, credit="parsed") in (0, 0.5)
    slow = {"type": "string", "pattern": "^(a+)+$"}
    evil = scored("json_schema", '"' + "a" * 60 + '!"', json_schema=slow, timeout_s=0.2)
    assert (evil.value, evil.metrics) == (0.0, {"unverified": 1.0})
    with pytest.raises(EnvironmentConfigError, match="json_schema is no JSON schema"):
        make_verifier("json_schema", {"json_schema": {"type": "strng"}})
    with pytest.raises(ValueError, match="no JSON schema in its column"):
        value("json_schema", "{}", schema_key="s")


def test_a_schema_fetches_nothing(scored):
    fetched = scored("json_schema", "1", json_schema={"$ref": "http://127.0.0.1:9/schema"})
    assert fetched.metrics == {"unverified": 1.0}


@pytest.mark.parametrize(
    ("text", "options", "given"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1),
        ("<think>a</think>\n <answer>b</answer>\n", {}, 1),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think>a</think><answer>b</answer> and more", {}, 0),
        ("<think>a</think><answer>b</answer> and more", {"only": False}, 1),
        ("<think>a</think><answer> </answer>", {}, 0),
        ("<think>a</think><answer> </answer>", {"filled": False}, 1),
        ("<think>a<answer></think>b</answer>", {}, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        ("<think>a</think><answer>b</answer>", {"opened": True}, 0),
        ("<think>a</think>b", {"credit": "each"}, 1 / 3),
        ("<think>a</think>b", {"credit": "each", "only": False}, 1 / 2),
        ("<think>a</think><answer>b</answer>", {"credit": "each"}, 1),
        ("", {"credit": "each"}, 0),
        ("<plan>a</plan>", {"tags": ["plan"]}, 1),
    ],
)
def test_tags_stand_in_order_and_once(value, text, options, given):
    assert value("tags", text, **options) == pytest.approx(given)


@pytest.mark.parametrize(
    ("tokens", "options", "given"),
    [
        (10, {"limit": 10}, 1),
        (11, {"limit": 10}, 0),
        (5, {"mode": "target", "limit": 10}, 0.5),
        (10, {"mode": "target", "limit": 10}, 1),
        (40, {"mode": "target", "limit": 10}, 0),
        (10, {"mode": "budget", "limit": 10, "tolerance": 4}, 0.5),
        (11, {"mode": "budget", "limit": 10, "tolerance": 4}, 0.25),
        (1, {"mode": "budget", "limit": 10, "tolerance": 4}, 1),
        (80, {"mode": "soft_overlong", "limit": 100, "buffer": 20}, 0),
        (90, {"mode": "soft_overlong", "limit": 100, "buffer": 20}, -0.5),
        (300, {"mode": "soft_overlong", "limit": 100, "buffer": 20}, -1),
    ],
)
def test_lengths_are_rewarded(value, tokens, options, given):
    assert value("length", "x", tokens=tokens, **options) == pytest.approx(given)


def test_lengths_are_of_characters_or_words_and_limits_of_rows(scored):
    text = "<think>long thoughts here</think>two words"
    assert scored("length", text, unit="words", part="answer", limit=2).value == 1
    assert scored("length", text, unit="words", limit=2).value == 0
    assert scored("length", "abcd", unit="characters", limit_key="budget", row={"budget": 4}).value == 1
    with pytest.raises(ValueError, match="a limit is a positive number"):
        scored("length", "abcd", limit_key="budget", row={"budget": "four"})


def test_citations_are_compared_with_the_right_sources(scored):
    row = {"citations": ["doc1", "Doc2"]}
    half = scored("citation", "So [doc1] and [doc9].", row=row)
    assert half.value == pytest.approx(0.5) and half.metrics["cited"] == 2
    assert scored("citation", "[doc1, DOC2]", row=row, measure="all").value == 1
    assert scored("citation", "[doc1; doc2; doc3]", row=row, measure="precision").value == pytest.approx(2 / 3)
    assert scored("citation", "[doc2]", row=row, measure="recall").value == 0.5
    assert scored("citation", "no sources", row=row, measure="any").value == 0
    assert scored("citation", "<think>[doc1] [doc2]</think>nothing", row=row).value == 0


def test_a_hit_is_what_was_retrieved_not_what_was_written(value):
    called = Message("assistant", "Paris?", tool_calls=(ToolCall("search", {"query": "capital"}),))
    found = (user("Is it Paris?"), called, Message("tool", "The capital is PARIS."), assistant("Paris"))
    assert value("retrieval_hit", "Paris", answer="Paris", messages=found) == 1
    assert value("retrieval_hit", "Rome", answer="Rome", messages=found) == 0
    assert value("retrieval_hit", "Par", answer="Pari", messages=found) == 0
    row = {"gold": ["Paris", "Rome"]}
    assert value("retrieval_hit", "x", messages=found, references="gold", measure="recall", row=row) == 0.5
    talked = (user("Paris"), assistant("?"), user("It is Lyon"))
    assert value("retrieval_hit", "x", answer="Paris", messages=talked, roles=["user"]) == 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("tgas", {}, "did you mean 'tags'"),
        ("tags", {"tagz": []}, "no option 'tagz'; did you mean 'tags'"),
        ("tags", {"tags": []}, "different names"),
        ("length", {}, "limit or limit_key"),
        ("length", {"limit": 5, "mode": "budget"}, "tolerance is of mode budget"),
        ("length", {"limit": 5, "buffer": 9, "mode": "soft_overlong"}, "within the limit"),
        ("length", {"limit": "5"}, "the option limit"),
        ("regex", {"pattern": "("}, "no regular expression"),
        ("regex", {"pattern": "a", "flags": "q"}, "flags are i, m, s and x"),
        ("regex", {}, "needs the option pattern"),
        ("json_schema", {}, "needs one of"),
        ("fuzzy_match", {"threshold": 80}, "above 0 and at most 1"),
        ("math", {"timeout_s": 0.0}, "must be positive"),
        ("retrieval_hit", {"roles": ["assistant"]}, "such as tool"),
        ("reward_model", {}, "needs the option model_name"),
        ("reward_model", {"model_name": "x", "device_map": "cuda"}, "set it to balanced"),
        ("json:loads", {}, "a function is a reward with function"),
    ],
)
def test_what_cannot_work_is_refused(name, options, says):
    with pytest.raises(EnvironmentConfigError, match=says):
        make_verifier(name, options)


def test_every_name_names_a_verifier():
    needed = {
        "judge": {"endpoint": {"base_url": "http://x/v1", "model": "m"}},
        "pairwise_judge": {"endpoint": {"base_url": "http://x/v1", "model": "m"}},
        "reward_model": {"model_name": "m"},
        "length": {"limit": 3},
        "regex": {"pattern": "a"},
        "json_schema": {"json_schema": {}},
    }
    for name in list_verifiers():
        assert make_verifier(name, needed.get(name, {}))
