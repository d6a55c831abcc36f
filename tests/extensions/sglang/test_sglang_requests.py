"""What SGLang is asked, and how its answers are read. The answers were recorded from a real server (0.5.23, on a CPU)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.extensions.sglang import server_process
from strop.extensions.sglang.server_process import ServerClient
from strop.extensions.sglang.sglang_requests import RequestAborted, SharedPixels, to_completion, to_request
from strop.sampling import KEPT, Sampling
from strop.types import PromptImage

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_answers.json").read_text())


class Letters:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


def ask(sampling: Sampling, sampler: str = "strop", seed: int = 5) -> dict[str, Any]:
    return to_request([7, 8], sampling, seed=seed, max_tokens=9, stop_ids=(2,), salt="load 3", sampler=sampler)


def test_a_request_says_the_distribution_its_seed_and_where_it_ends() -> None:
    asked = ask(
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, max_new_tokens=30, stop_token_ids=(4,), stop_strings=("x",))
    )
    options = asked["sampling_params"]
    assert asked["input_ids"] == [7, 8] and asked["return_logprob"] and asked["extra_key"] == "load 3"
    assert (options["temperature"], options["top_k"], options["top_p"], options["min_p"]) == (0.7, 5, 0.9, 0.1)
    assert options["max_new_tokens"] == 9, "what is left of the context"
    assert options["stop_token_ids"] == [2, 4] and options["stop"] == ["x"] and options["sampling_seed"] == 5


def test_a_greedy_request_has_no_filters_and_no_seed() -> None:
    options = ask(Sampling(temperature=0, top_k=7))["sampling_params"]
    assert options["temperature"] == 0 and not {"top_k", "top_p", "min_p", "sampling_seed"} & options.keys()


def test_seeds_of_64_bits_fit_what_sglang_takes() -> None:
    assert 0 <= ask(Sampling(), seed=2**64 - 1)["sampling_params"]["sampling_seed"] < 2**63


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(top_k=1), "which SGLang takes for greedy sampling"),
        (Sampling(entropy=True), "entropy"),
    ],
    ids=["top_k", "entropy"],
)
def test_what_sglang_would_sample_otherwise_than_the_learner_computes_is_refused(sampling: Sampling, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ask(sampling)


def test_the_mask_is_asked_for_where_it_is_recorded_or_corrects_log_probabilities() -> None:
    filtered, recorded = Sampling(top_k=5), Sampling(top_k=5, record_sampling_mask=True)
    assert not ask(filtered)["return_sampling_mask"]
    assert ask(recorded)["return_sampling_mask"] and ask(filtered, "sglang")["return_sampling_mask"]
    assert not ask(Sampling(), "sglang")["return_sampling_mask"]


def test_a_recorded_answer_is_read_as_the_tokens_that_were_sampled() -> None:
    answer = ANSWERS["plain"]
    completion = to_completion(answer, Sampling(), Letters(), sampler="strop")
    assert completion.tokens.tolist() == answer["output_ids"] and not completion.stopped
    assert completion.versions.tolist() == [0] * len(completion.tokens)
    assert torch.isfinite(completion.logprobs).all() and (completion.logprobs < 0).all()


def test_a_stop_token_belongs_to_the_completion_that_it_ends() -> None:
    completion = to_completion(ANSWERS["stop token"], Sampling(), Letters(), sampler="strop")
    assert completion.stopped and completion.tokens[-1] == ANSWERS["stop token"]["meta_info"]["finish_reason"]["matched"]


def test_a_stop_string_ends_a_completion_with_its_tokens() -> None:
    answer = ANSWERS["stop string"]
    completion = to_completion(answer, Sampling(), Letters(), sampler="strop")
    assert completion.stopped and len(completion.tokens) == answer["meta_info"]["completion_tokens"]


def test_tokens_of_two_versions_say_which_sampled_them() -> None:
    answer = ANSWERS["two versions"]
    first, second = answer["meta_info"]["weight_versions"]
    versions = to_completion(answer, Sampling(), Letters(), sampler="strop").versions.tolist()
    assert versions == [int(first["version"])] * first["end"] + [int(second["version"])] * (second["end"] - second["start"])


def test_sglangs_own_sampler_is_corrected_by_the_tokens_that_it_kept() -> None:
    """Its log-probabilities are of all tokens; those of the kept ones are higher by the logarithm of their share."""
    answer, sampling = ANSWERS["sampling mask"], Sampling(top_k=8, record_sampling_mask=True)
    info = answer["meta_info"]
    of_all = [[value - 0.25, token, None] for value, token, *_ in info["output_token_logprobs"]]
    kept = to_completion(
        {**answer, "meta_info": {**info, "output_token_logprobs": of_all}}, sampling, Letters(), sampler="sglang"
    )
    assert kept.logprobs.tolist() == pytest.approx(info["output_token_sampling_logprobs"])
    assert kept.columns[KEPT].shape == (len(kept.tokens), 8)
    assert all(token in row for token, row in zip(kept.tokens.tolist(), kept.columns[KEPT].tolist(), strict=True))


def test_filters_of_sglangs_own_sampler_without_their_mask_are_refused() -> None:
    with pytest.raises(RuntimeError, match="of another distribution"):
        to_completion(ANSWERS["plain"], Sampling(top_k=8), Letters(), sampler="sglang")


def test_an_aborted_request_is_no_completion() -> None:
    with pytest.raises(RequestAborted, match="abort"):
        to_completion(ANSWERS["aborted"], Sampling(), Letters(), sampler="strop")


@pytest.mark.parametrize("change", [{"weight_versions": None}, {"output_token_logprobs": []}], ids=["versions", "logprobs"])
def test_an_answer_that_leaves_something_out_is_refused(change: dict[str, Any]) -> None:
    answer = {**ANSWERS["plain"], "meta_info": {**ANSWERS["plain"]["meta_info"], **change}}
    with pytest.raises(RuntimeError, match="SGLang"):
        to_completion(answer, Sampling(), Letters(), sampler="strop")


class CountingVision:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def pixels(self, image: Any) -> dict[str, torch.Tensor]:
        self.asked.append(image.digest)
        if image.content == b"broken":
            raise ValueError("no image")
        return {"pixel_values": torch.ones(2, 3)}


def image(digest: str = "a", content: bytes = b"") -> PromptImage:
    return PromptImage(start=2, length=4, content=content, digest=digest)


def test_requests_with_an_image_in_common_share_its_file_until_the_last_ends(tmp_path: Path) -> None:
    vision: Any = CountingVision()
    shared = SharedPixels(vision, tmp_path)

    async def hold(*images: PromptImage) -> None:
        async with shared.hold(images, salt="load 1") as said:
            fields = [json.loads(each) for each in said]
            assert [(each["start"], each["length"]) for each in fields] == [(2, 4)] * len(images)
            assert fields[0]["identity"] == f"{images[0].digest} load 1"
            await asyncio.sleep(0.01)
            for each in fields:
                assert torch.equal(torch.load(tmp_path / each["file"], weights_only=True)["pixel_values"], torch.ones(2, 3))

    async def together() -> None:
        await asyncio.gather(hold(image("a")), hold(image("a"), image("b")), hold(image("b"), image("b")))

    asyncio.run(together())
    assert sorted(vision.asked) == ["a", "b"] and not list(tmp_path.iterdir())


def test_an_image_that_cannot_be_read_is_an_error_of_its_request_and_leaves_no_file(tmp_path: Path) -> None:
    vision: Any = CountingVision()
    shared = SharedPixels(vision, tmp_path)

    async def hold() -> None:
        async with shared.hold([image("c", b"broken")], salt=""):
            pytest.fail("it was held")

    for _ in range(2):
        with pytest.raises(ValueError, match="no image"):
            asyncio.run(hold())
    assert not list(tmp_path.iterdir()) and vision.asked == ["c", "c"]


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_that_was_not_used_for_a_while_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may close it at any moment, and a POST that it meets would fail."""
    monkeypatch.setattr(server_process, "KEEP_ALIVE", 0.2)
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            await reader.readexactly(2)  # the body: {}
            writer.write(ANSWER)

    async def ask() -> tuple[int, int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = ServerClient(server.sockets[0].getsockname()[1], "key")
        for _ in range(2):
            await client.post("/at_once")
        at_once = connections
        await asyncio.sleep(0.5)
        await client.post("/later")
        await client.close()
        server.close()
        return at_once, connections

    assert asyncio.run(ask()) == (1, 2)
    monkeypatch.undo()
    assert server_process.KEEP_ALIVE < 5  # seconds: SGLANG_TIMEOUT_KEEP_ALIVE
