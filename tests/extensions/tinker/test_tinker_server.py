"""``strop serve --tinker``, by the real SDK: what it trains, samples and saves."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch

from loop.tiny import build_tiny
from strop.extensions.tinker.tinker_server import TinkerServer
from strop.extensions.tinker.wire import WeightFolders
from strop.models.loading import load_model
from strop.safety.http_server import listening
from strop.user_code import import_attribute
from support.hostile_bodies import DEEP, send

pytestmark = pytest.mark.slow

KEY, NAME, LENGTH = "tml-secret", "mine/tiny", 96


class ServedTinker:
    """The service in the event loop of another thread."""

    def __init__(self, model: Path, state: Path, key: str | None = KEY) -> None:
        self.server = TinkerServer(
            name=NAME,
            base={
                "model_name": str(model), "precision": "float32", "device": "cpu", "num_threads": 1, "tokenizer": {"name": str(model)},
            },
            folders=WeightFolders(state), length=LENGTH, api_key=key, max_models=3, kv_cache_gb=0.01,
        )  # fmt: skip
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        assert self.ready.wait(60)

    async def _main(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        async with listening(self.server.make_app(), ("127.0.0.1", 0), shutdown_s=1) as self.address:
            self.ready.set()
            await self.stop.wait()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTinker]:
    service = ServedTinker(model_folder, tmp_path_factory.mktemp("tinker-state"))
    yield service
    service.close()


@pytest.fixture
def client(served: ServedTinker) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=served.address, api_key=KEY)
    yield service
    service.close("success").result(10)


def as_inputs(lists: dict[str, Any]) -> Any:
    return lists  # the SDK makes tensors of lists, though its annotation does not say so


def cross_entropy(tokens: list[int]) -> Any:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=as_inputs({"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}),
    )


def log_probabilities(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    found: torch.Tensor = logs[:-1].gather(1, torch.tensor(tokens)[1:, None]).squeeze(1)
    return found


SENTENCES = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23]]


@pytest.fixture
def training(served: ServedTinker, client: Any) -> Iterator[Any]:
    training = client.create_lora_training_client(base_model=NAME, rank=16, seed=3).result()
    yield training
    served.server._clients.clear()


def test_forward_gives_the_log_probabilities_of_the_base_model_and_the_loss_is_their_negative_sum(
    training: Any, model_folder: Path
) -> None:
    result = training.forward([cross_entropy(each) for each in SENTENCES], "cross_entropy").result()
    model = load_model(str(model_folder))
    wanted = [log_probabilities(model, each) for each in SENTENCES]
    for output, each in zip(result.loss_fn_outputs, wanted, strict=True):
        assert torch.allclose(torch.tensor(output["logprobs"].tolist()), each, atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(-float(torch.cat(wanted).sum()), rel=1e-5)


def test_training_lowers_the_loss_and_the_samples_of_saved_weights_follow(training: Any, client: Any) -> None:
    data = [cross_entropy(each) for each in SENTENCES]
    losses = []
    for _ in range(30):
        run, step = training.forward_backward(data, "cross_entropy"), training.optim_step(tinker.AdamParams(learning_rate=0.02))
        losses.append(run.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.2 * losses[0]
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(SENTENCES[0][:3])
    params = tinker.SamplingParams(max_tokens=3, temperature=0.0)
    assert sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens == [13, 14, 15]
    base = client.create_sampling_client(base_model=NAME).result()
    assert base.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens != [13, 14, 15]
    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(SENTENCES[0])).result()
    assert scores[0] is None or math.isnan(scores[0])
    trained = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert scores[1:] == pytest.approx(trained, abs=1e-4), "the sampler computes with what was trained"


def test_samples_have_the_log_probabilities_they_were_drawn_with_and_a_seed_repeats_them(client: Any, model_folder: Path) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result()
    prompt = [30, 31, 32]
    params = tinker.SamplingParams(max_tokens=6, temperature=1.0, seed=5)
    first, again = (
        sampler.sample(prompt=tinker.ModelInput.from_ints(prompt), num_samples=3, sampling_params=params).result().sequences
        for _ in range(2)
    )
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert len({tuple(each.tokens) for each in first}) > 1, "samples of one request differ"
    model = load_model(str(model_folder))
    for each in first:
        wanted = log_probabilities(model, [*prompt, *each.tokens])[len(prompt) - 1 :]
        assert each.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_state_goes_on_exactly_where_it_was_saved(training: Any, client: Any, served: ServedTinker) -> None:
    data, adam = [cross_entropy(each) for each in SENTENCES], tinker.AdamParams(learning_rate=0.01)

    def steps(model: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(model.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            model.optim_step(adam).result()
        return losses

    steps(training, 3)
    saved = training.save_state("third").result().path
    wanted = steps(training, 3)
    restored = client.create_training_client_from_state_with_optimizer(saved).result()
    assert steps(restored, 3) == wanted
    training.load_state_with_optimizer(saved).result()
    assert steps(training, 3) == wanted
    without = client.create_training_client_from_state(saved).result()
    assert steps(without, 3) != wanted, "the momentum of Adam begins anew"


def policy_datum(tokens: list[int], logprobs: list[float], advantages: list[float]) -> Any:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=as_inputs({"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}),
    )


def written_out(name: str, p: list[float], q: list[float], a: list[float]) -> float:
    total = 0.0
    for new, old, advantage in zip(p, q, a, strict=True):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 0.8), 1.2)
        total -= {
            "importance_sampling": ratio * advantage,
            "ppo": min(ratio * advantage, clipped * advantage),
            "cispo": clipped * advantage * new,
            "dro": advantage * new - 0.025 * (new - old) ** 2,
        }[name]
    return total


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_loss_is_its_formula(training: Any, name: str) -> None:
    tokens = SENTENCES[0]
    now = training.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    before = [value + shift for value, shift in zip(now, [0.5, -0.5, 0.1, -0.1, 0.0], strict=True)]
    advantages = [1.0, 1.0, -1.0, -2.0, 0.0]
    result = training.forward_backward([policy_datum(tokens, before, advantages)], name).result()
    assert result.metrics["loss:sum"] == pytest.approx(written_out(name, now, before, advantages), rel=1e-4)


def test_a_loss_of_the_clients_own_trains_as_the_one_of_the_server_does(client: Any, served: ServedTinker) -> None:
    def negative_sum(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {}

    results = []
    for own in (False, True):
        model = client.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
        data = [cross_entropy(each) for each in SENTENCES]
        for _ in range(2):
            run = model.forward_backward_custom(data, negative_sum) if own else model.forward_backward(data, "cross_entropy")
            run.result()
            model.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        results.append(model.forward(data, "cross_entropy").result().metrics["loss:sum"])
    served.server._clients.clear()
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_what_is_not_served_is_said_in_the_client(training: Any, client: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="the loss 'gspo' is not served here; use one of cross_entropy"):
        training.forward_backward([cross_entropy(SENTENCES[0])], "gspo").result()
    with pytest.raises(tinker.RequestFailedError, match=r"datum 0 has no loss_fn_inputs\['logprobs'\]"):
        training.forward_backward([cross_entropy(SENTENCES[0])], "ppo").result()
    assert training.forward([cross_entropy(SENTENCES[0])], "cross_entropy").result(), "the model lives on"
    with pytest.raises(Exception, match="the base model 'other/model' is not served here"):
        client.create_lora_training_client(base_model="other/model").result()
    with pytest.raises(Exception, match="nothing is saved as tinker://none/weights/none"):
        client.create_training_client_from_state("tinker://none/weights/none").result()


def test_a_wrong_key_is_refused(served: ServedTinker) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=served.address, api_key="tml-wrong").create_lora_training_client(base_model=NAME).result()


def test_calls_that_arrive_in_another_order_run_in_their_own(training: Any, served: ServedTinker) -> None:
    """The SDK numbers its calls; steps must not overtake the gradients they wait for."""
    data, adam = [cross_entropy(each) for each in SENTENCES], tinker.AdamParams(learning_rate=0.01)
    futures = [
        future for _ in range(5) for future in (training.forward_backward(data, "cross_entropy"), training.optim_step(adam))
    ]
    losses = [future.result().metrics["loss:sum"] for future in futures[::2]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 5


@pytest.mark.exhaustive
def test_the_example_learns(served: ServedTinker, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "tinker_digits.py"
    import_attribute(f"{example}:main")(served.address, KEY, NAME)
    rewards = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    served.server._clients.clear()
    assert len(rewards) == 10 and sum(rewards[-3:]) > sum(rewards[:3]), rewards


def test_names_of_weights_cannot_leave_their_folder(training: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="cannot be the name of weights"):
        training.save_state("../../escaped").result()


class Calls:
    """The service without the SDK, which checks what it sends."""

    def __init__(self, served: ServedTinker) -> None:
        self.served, self.count = served, 0

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, answer = send(self.served.address, f"/api/v1/{path}", body, {"X-API-Key": KEY, **headers})
        return status, json.loads(answer)

    def sample(self, prompt: Any, **changes: Any) -> dict[str, Any] | bytes:
        """Sample, and wait for the answer; an error of the request has the category user."""
        self.count += 1
        params = changes.pop("sampling_params", {"max_tokens": 2})
        body = {"prompt": prompt, "sampling_params": params, "num_samples": 1, "seq_id": self.count, **changes}
        status, answer = self.post("asample", body)
        if status != 200:
            return {"category": "user", "status": status, **answer}
        found = send(self.served.address, "/api/v1/retrieve_future", {"request_id": answer["request_id"]}, {"X-API-Key": KEY})[1]
        result: dict[str, Any] = json.loads(found) if found.startswith(b"{") else {"sampled": found}
        return result

    def still_samples(self) -> None:
        assert "sampled" in self.sample(chunks([5, 6, 7]))


def chunks(tokens: Any) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def test_no_sampling_call_stops_the_engine_of_all_clients(served: ServedTinker) -> None:
    calls, good = Calls(served), chunks([5, 6])
    calls.still_samples()
    odd: list[tuple[Any, dict[str, Any]]] = [
        *((chunks(tokens), {}) for tokens in ([10**9], [True], [-1], [2**63], [1.5], ["a"], [], None, 5, [[5]], list(range(LENGTH)))),
        *((prompt, {}) for prompt in (5, "text", [], {"chunks": 5}, {"chunks": [5]}, {"chunks": [{"tokens": "ab"}]}, None)),
        *((good, {"num_samples": count}) for count in (0, True, "1", 1.5, 10**9, None)),
        *((good, {"sampling_params": params}) for params in ("x", 5, [1])),
        *((good, {"sampling_params": {"max_tokens": 2, name: value}}) for name, value in (
            ("temperature", "x"), ("temperature", 1e-300), ("temperature", 1e999), ("top_p", 0), ("top_p", "x"), ("top_k", "x"),
            ("top_k", True), ("top_k", -5), ("seed", "x"), ("seed", 1.5), ("stop", ["\ud800"]), ("stop", [1.5]), ("stop", {"a": 1}),
            ("stop", [True]), ("stop", [""]), ("max_tokens", "x"), ("max_tokens", 0), ("max_tokens", -1),
        )),
        *((good, {name: value}) for name, value in (("sampling_session_id", [1]), ("sampling_session_id", "none"), ("model_path", 5))),
    ]  # fmt: skip
    for prompt, changes in odd:
        answer = calls.sample(prompt, **changes)
        assert isinstance(answer, dict) and answer.get("category") == "user", (prompt, changes, answer)
    calls.still_samples()


def test_what_is_no_request_is_answered_with_the_reason(served: ServedTinker) -> None:
    calls = Calls(served)
    for path, body in (
        ("create_model", {"session_id": "s", "model_seq_id": 1, "lora_config": [1]}),
        ("create_model", {"session_id": "s", "model_seq_id": 1, "lora_config": {"rank": True}}),
        ("create_model", {"session_id": "s", "model_seq_id": 1, "lora_config": {"seed": "x"}}),
        ("create_model", {"session_id": "s", "model_seq_id": 1, "optimizer_config": "x"}),
        ("create_model", {"session_id": 5, "model_seq_id": 1}),
        ("create_model", {"session_id": "s", "model_seq_id": 10**400}),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 1, "model_path": 5}),
        ("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": "x"}),
        ("weights_info", {"tinker_path": [1]}),
        ("save_weights", {"model_id": ["m"]}),
        ("create_model", DEEP),
        ("create_model", b"\xff"),
        ("create_model", b"[]"),
        ("forward_backward", b"\xff\xff"),
    ):
        status, answer = calls.post(path, body)
        assert status == 422 and answer["detail"], (path, body, answer)
    assert calls.post("create_session", {}, **{"Content-Type": "application/json; charset=bogus"})[0] == 200
    assert calls.post("create_session", {}, **{"X-API-Key": "schl\udcffssel"})[0] == 401
    assert send(served.address, "/api/v1/nothing", {}, {"X-API-Key": KEY})[0] == 404


def test_weights_whose_engine_stopped_are_loaded_again(served: ServedTinker) -> None:
    calls = Calls(served)
    calls.still_samples()
    loaded = served.server.sampler._loaded[None]
    loaded.engine._fail(RuntimeError("the device is gone"))
    calls.still_samples()
    assert served.server.sampler._loaded[None] is not loaded
