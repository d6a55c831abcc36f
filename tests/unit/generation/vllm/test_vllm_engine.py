"""A real vLLM engine answers as every generator does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from strop.sampling import Sampling
from support.engine_contract import (  # noqa: F401
    PROMPT,
    ask,
    test_a_later_turn_finds_its_conversation_in_the_prefix_cache,
    test_a_prompt_that_cannot_fit_is_refused_with_what_to_set,
    test_a_stop_string_ends_a_completion_and_is_in_its_text,
    test_a_stop_token_ends_a_completion_and_belongs_to_it,
    test_equal_requests_give_equal_tokens_whoever_shares_the_batch,
    test_logprobs_are_those_of_the_distribution_that_sampled,
    test_the_tokens_that_each_one_was_drawn_from_are_recorded,
)

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


def test_a_cancelled_request_ends_in_the_engine(room: BackgroundLoop, served: ServedModel) -> None:
    async def cancel() -> int:
        task = asyncio.create_task(served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=200), seed=1))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=4), seed=1)
        return served.engine._engine.get_num_unfinished_requests()

    assert room.run(cancel()) == 0


def test_what_vllm_would_sample_otherwise_than_the_learner_computes_is_refused(room: BackgroundLoop, served: ServedModel) -> None:
    with pytest.raises(ValueError, match=r"0\.01"):
        ask(room, served, Sampling(temperature=0.005))


def test_starting_an_engine_leaves_this_process_its_environment(served: ServedModel) -> None:
    import os

    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    assert os.environ.get("OMP_NUM_THREADS") == "1"
    assert served.engine.launch.output_file is not None and served.engine.launch.output_file.exists()
