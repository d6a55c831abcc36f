"""Groups and prompts made ahead of the loop: the same tokens, in workers that may die."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.extensions.math.math_environment import MathEnvironment
from strop.extensions.recorded.recorded_tokens import RecordedConversation, RecordedRules, tokenize_group
from strop.extensions.recorded.tokenizing_pool import (
    TokenizingPool,
    TokenizingWorkerDied,
    choose_num_workers,
    serve,
    write_message,
)
from strop.models.chat_template import ChatTemplate
from strop.rollouts.prepared_ahead import GroupsAhead, PromptsAhead
from strop.types import Group, assistant, user
from support.tokenizer import build_tokenizer

RULES = RecordedRules(max_length=64)


def conversation(text: str) -> tuple[RecordedConversation, ...]:
    return (RecordedConversation((user(text), assistant("19"))),)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(build_tokenizer())


@pytest.fixture
def pool(template: ChatTemplate, workers_are_forks: None) -> Iterator[TokenizingPool]:
    made = TokenizingPool(template, RULES, 1)
    made.wait_until_ready()
    yield made
    made.close()
    assert not made.pids


def test_a_worker_gives_the_tokens_and_errors_of_the_loop_and_survives_its_death(
    pool: TokenizingPool, template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [conversation(text) for text in ("12 + 7?", "", "x" * 100)]
    wanted = [tokenize_group(group, template, RULES) for group in groups]
    assert [pool.tokenize(group) for group in groups] == wanted
    assert str(wanted[2]).startswith("ExampleTooLong: it has")
    (pid,) = pool.pids
    (worker,) = pool._processes
    os.kill(pid, signal.SIGKILL)
    assert worker.stdout is not None and worker.stdout.read() == b"", "it has gone, and the fork that it stood for"
    assert pool.tokenize(groups[0]) == wanted[0]
    assert f"the process {pid} that tokenizes ended with exit status -9; another one is started" in caplog.text
    assert pool.pids and pid not in pool.pids


@pytest.mark.exhaustive
def test_an_example_that_kills_two_workers_is_an_error_that_says_so(
    pool: TokenizingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.extensions.recorded import tokenizing_pool

    send = tokenizing_pool.write_message

    def kill_first(pipe: Any, message: Any) -> None:
        if message == conversation("deadly"):
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        send(pipe, message)

    monkeypatch.setattr(tokenizing_pool, "write_message", kill_first)
    with pytest.raises(TokenizingWorkerDied, match=r"exit status -9, as the one before it .* data.num_workers=0"):
        pool.tokenize(conversation("deadly"))


def test_a_tokenizer_that_cannot_be_sent_is_used_in_a_thread_with_a_warning(
    template: ChatTemplate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "strop.extensions.recorded.tokenizing_pool.write_message",
        lambda pipe, message: (_ for _ in ()).throw(TypeError("a lock")),
    )
    pool = TokenizingPool(template, RULES, 1)
    pool.wait_until_ready()
    assert pool.tokenize(conversation("a")) == tokenize_group(conversation("a"), template, RULES)
    assert "no worker could start (TypeError: a lock)" in caplog.text
    pool.close()


def test_the_number_of_workers_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, wanted in ((4, 0), (16, 2), (192, 4)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert choose_num_workers(None) == wanted and choose_num_workers(1) == 1


def test_groups_ahead_come_in_any_order_that_a_resumed_run_asks_for() -> None:
    made: list[int] = []

    def make(index: int) -> Group:
        made.append(index)
        return Group(index=index, environment="", version=-1, rollouts=())

    async def read() -> list[int]:
        ahead = GroupsAhead(make, lambda index: index < 12, ahead=3, threads=2)
        found = [(await ahead.read(index)).index for index in (2, 5, 8, 9, 10, 11)]
        assert len(ahead._groups) == 0
        await ahead.close()
        return found

    assert asyncio.run(read()) == [2, 5, 8, 9, 10, 11] and max(made) == 11


def mixture(tmp_path: Path, **options: Any) -> Mixture:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"problem": "{n}?", "answer": "{n}"}}\n' for n in range(12)))
    environment = MathEnvironment(**options)
    return Mixture(
        (
            Component(
                "math", LocalEnvironment(environment), environment.tasks(DataSource(dataset_name=str(tmp_path / "rows.jsonl")))
            ),
        ),
        max_epochs=1,
    )


def test_prompts_are_tokenized_ahead_and_once_for_all_samples(tmp_path: Path) -> None:
    template, source = ChatTemplate(build_tokenizer()), mixture(tmp_path)
    ahead = PromptsAhead(source.peek_messages, template, ahead=4)
    ahead.advance(0)
    ahead.advance(9)
    ahead._thread.shutdown()  # once all are made
    asyncio.run(ahead.close())
    prompts = [source.at(index)[2].messages for index in range(12)]  # type: ignore[attr-defined]
    assert set(template._prompts) == {tuple(prompts[index]) for index in (1, 2, 3, 4, 10, 11)}
    fresh = ChatTemplate(build_tokenizer())
    for messages in prompts:
        assert template.encode_prompt(messages) == template.encode_prompt(list(messages)) == fresh.encode_prompt(messages)
        assert template.encode_prompt(messages) is not template.encode_prompt(messages)  # nobody changes what others get


def test_a_prompt_that_an_environment_makes_itself_is_not_made_ahead(tmp_path: Path) -> None:
    class Own(MathEnvironment):
        def prompt(self, task: Any) -> Any:
            raise AssertionError("it was called ahead")

    source = mixture(tmp_path)
    tasks = source.components[0].tasks
    assert Mixture((Component("own", LocalEnvironment(Own()), tasks),)).peek_messages(0) is None
    assert source.peek_messages(0) and source.peek_messages(99) is None


class ClosedPipe(io.BytesIO):
    def write(self, data: Any) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("sent", [(), ((None, None),), ("no pair",), ((None, None), [])])
def test_a_worker_whose_run_was_killed_ends_without_a_word(sent: tuple[Any, ...]) -> None:
    requests = io.BytesIO()
    for message in sent:
        write_message(requests, message)
    requests.seek(0)
    serve(requests, ClosedPipe())
