"""The HTTP service that the Tinker SDK talks to (``TINKER_BASE_URL``): sessions, models, training, sampling, saved weights."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from strop.extensions.tinker.tuned_model import SampleCall, TunedModel, WeightSampler
from strop.extensions.tinker.wire import (
    CONTENT_TYPE,
    AdapterShape,
    TinkerRequestError,
    WeightFolders,
    read_forward_backward,
    write_samples,
)
from strop.generation.base import InvalidRequest, check_request
from strop.safety.http_server import check_sender, make_app, read_body, read_json_object
from strop.safety.site_guard import JSON, BadRequest
from strop.sampling import MAX_COUNT, Sampling, is_encodable, is_whole, mix_seed, shown

log = logging.getLogger(__name__)

Result = bytes | dict[str, Any]  # protobuf or JSON

KEPT_RESULTS = 512  # results that were fetched, for clients that lost the answer
POLL_SECONDS = 20.0  # the SDK gives up a poll after 45


class Promises:
    """Tasks by the names that clients know them by."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._fetched: OrderedDict[str, None] = OrderedDict()

    def start(self, name: str, work: Callable[[], Awaitable[Result]]) -> str:
        """Start ``work``, unless a request of this name was already received: the SDK repeats requests whose answer it lost."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(_answer(work))
        return name

    async def retrieve(self, name: str) -> Result | None:
        """Return the result, or None if it takes longer than a poll should. Raises KeyError for an unknown name."""
        task = self._tasks[name]
        await asyncio.wait([task], timeout=POLL_SECONDS)
        if not task.done():
            return None
        self._fetched[name] = None
        while len(self._fetched) > KEPT_RESULTS:
            oldest, _ = self._fetched.popitem(last=False)
            self._tasks.pop(oldest, None)
        return task.result()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def _answer(work: Callable[[], Awaitable[Result]]) -> Result:
    """Await the work. An error is a result, too: the SDK raises it in the client."""
    try:
        return await work()
    except (TinkerRequestError, InvalidRequest) as error:
        return {"error": str(error), "category": "user"}
    except Exception as error:
        log.exception("a request of a Tinker client failed")
        return {"error": f"the server failed ({type(error).__name__}); its log says why", "category": "server"}


class CallOrder:
    """Runs the calls of one model in the order of their numbers, which begin with 1, though requests may arrive in another one."""

    WAIT_SECONDS = 600.0  # for a call that a client has not sent

    def __init__(self) -> None:
        self._next = 1
        self._changed = asyncio.Condition()

    async def run(self, number: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` in a thread when it is its turn. Raises TinkerRequestError if the call before it never comes."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._next >= number), self.WAIT_SECONDS)
            except TimeoutError as error:
                raise TinkerRequestError(
                    f"call {number} of this model waited {self.WAIT_SECONDS:.0f} s for call {self._next}, which was not sent"
                ) from error
            try:
                return await asyncio.to_thread(work)
            finally:
                self._next = max(self._next, number + 1)
                self._changed.notify_all()


MAX_BODY = 256 * 2**20  # bytes
MAX_RANK = 512
MAX_SAMPLES = 1024
KINDS = (*JSON, CONTENT_TYPE)  # of bodies
OUTPUT_LAYER = "adapters on the output layer are not served here: train_unembed has no effect"


@dataclass(eq=False)
class _Client:
    """A model that a client trains, and the order of its calls."""

    shape: AdapterShape
    order: CallOrder = field(default_factory=CallOrder)
    model: TunedModel | None = None  # once it is loaded


@dataclass(eq=False)
class TinkerServer:
    """Serves one base model. Every model that a client creates has its own adapters and optimizer."""

    name: str  # of the base model
    base: dict[str, Any]  # options of ``ModelConfig`` that load it
    folders: WeightFolders
    length: int  # tokens of a sequence
    api_key: str | None = None
    host: str = "127.0.0.1"  # that it listens on
    max_models: int = 4
    kv_cache_gb: float = 2.0

    def __post_init__(self) -> None:
        self.promises = Promises()
        self.sampler = WeightSampler(self.base, self.folders, length=self.length, kv_cache_gb=self.kv_cache_gb)
        self._clients: dict[str, _Client] = {}
        self._sampling: dict[str, str | None] = {}  # sampling session -> address of weights; None: the base model

    def make_app(self) -> web.Application:
        app = make_app(self._check, _answer_error, max_body=MAX_BODY)
        app.on_cleanup.append(self._close)
        gets = {"healthz": self._healthz, "get_server_capabilities": self._capabilities}
        posts = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._heartbeat,
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        app.router.add_routes([web.get(f"/api/v1/{path}", handler) for path, handler in gets.items()])
        app.router.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in posts.items()])
        return app

    def _check(self, request: web.Request) -> None:
        why = "the key is wrong: set TINKER_API_KEY to the server's --api-key"
        check_sender(request, self.host, self.api_key, request.headers.get("X-API-Key", ""), kinds=KINDS, help=why)

    async def _close(self, app: web.Application) -> None:
        await self.promises.close()
        await self.sampler.close()

    # --- about the server ------------------------------------------------------------------------------------------------

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {"model_name": self.name, "max_context_length": self.length, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    async def _client_config(self, request: web.Request) -> web.Response:
        return web.json_response({"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": False})

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _telemetry(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "accepted"})  # and not kept

    async def _create_session(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"type": "create_session", "session_id": f"session-{uuid.uuid4().hex}", "info_message": OUTPUT_LAYER}
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        return web.json_response({"type": "session_heartbeat"})

    # --- models ----------------------------------------------------------------------------------------------------------

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        self._check_base(body.get("base_model"))
        if (optimizer := _mapping(body, "optimizer_config").get("type", "adamw")) != "adamw":
            raise TinkerRequestError(f"the optimizer {shown(optimizer)} is not served here; use adamw")
        name = f"{_text(body, 'session_id')}:train:{_whole(body, 'model_seq_id')}"
        shape = _read_shape(_mapping(body, "lora_config"))
        return self._promise(f"{name}-create", lambda: self._load_model(name, shape), name)

    def _check_base(self, asked: Any) -> None:
        if asked not in (None, self.name):
            raise TinkerRequestError(f"the base model {asked!r} is not served here; this server has {self.name!r}")

    async def _load_model(self, name: str, shape: AdapterShape) -> Result:
        if len(self._clients) >= self.max_models:
            raise TinkerRequestError(
                f"{len(self._clients)} models are being trained, and the server takes {self.max_models} (--max-models): unload one"
            )
        client = self._clients[name] = _Client(shape)
        try:
            client.model = await asyncio.to_thread(TunedModel, self.base, shape)
        except BaseException:
            del self._clients[name]
            raise
        return {"type": "create_model", "model_id": name}

    async def _unload_model(self, request: web.Request) -> web.Response:
        name = _text(await read_json_object(request), "model_id")
        self._find(name)

        async def unload() -> Result:
            del self._clients[name]
            return {"type": "unload_model", "model_id": name}

        return self._promise(f"{name}-unload", unload, name)

    def _find(self, name: str) -> tuple[_Client, TunedModel]:
        client = self._clients.get(name)
        if client is None or client.model is None:
            raise TinkerRequestError(f"there is no model {name!r} here: it was not created, or was unloaded")
        return client, client.model

    async def _get_info(self, request: web.Request) -> web.Response:
        name = _text(await read_json_object(request), "model_id")
        client, _ = self._find(name)
        about = {"model_name": self.name, "tokenizer_id": self.base["tokenizer"]["name"]}
        adapters = {"is_lora": True, "lora_rank": client.shape.rank}
        return web.json_response({"type": "get_info", "model_id": name, "model_name": self.name, "model_data": about, **adapters})

    async def _weights_info(self, request: web.Request) -> web.Response:
        _, shape = self.folders.find(_text(await read_json_object(request), "tinker_path"))
        layers = {"train_unembed": False, "train_mlp": shape.train_mlp, "train_attn": shape.train_attn}
        return web.json_response({"base_model": self.name, "is_lora": True, "lora_rank": shape.rank, **layers})

    # --- training --------------------------------------------------------------------------------------------------------

    async def _forward_backward(self, request: web.Request) -> web.Response:
        call = read_forward_backward(await read_body(request))
        _, model = self._find(call.model_id)
        return self._call(call.model_id, call.seq_id, lambda: model.forward_backward(call))

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        if not (adam := _mapping(body, "adam_params")):
            raise TinkerRequestError("optim_step takes adam_params here; other optimizers are not served")
        _, model = self._find(_text(body, "model_id"))
        return self._in_order(body, lambda: {"metrics": model.optim_step(adam)})

    async def _save_weights(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        client, model = self._find(_text(body, "model_id"))
        given = _optional_text(body, "path")
        if body.get("ttl_seconds") is not None:
            log.warning("weights are kept until they are deleted: ttl_seconds=%s has no effect", body["ttl_seconds"])

        def save() -> Result:
            name, overwrite = given or f"state-{body['seq_id']:06d}", bool(body.get("overwrite"))
            address, folder = self.folders.new(body["model_id"], "weights", name, client.shape, overwrite=overwrite)
            model.save(folder)
            return {"type": "save_weights", "path": address}

        return self._in_order(body, save)

    async def _load_weights(self, request: web.Request) -> web.Response:
        """Load into a model, or make one: the SDK then names it by its session, as in create_model."""
        body = await read_json_object(request)
        folder, shape = self.folders.find(_text(body, "path"))
        if body.get("model_id") is not None:
            _, model = self._find(_text(body, "model_id"))

            def load() -> Result:
                model.load(folder, optimizer=bool(body.get("optimizer")))
                return {"type": "load_weights", "path": body["path"], "model_id": body["model_id"]}

            return self._in_order(body, load)
        self._check_base(body.get("base_model"))
        name = f"{_text(body, 'session_id')}:train:{_whole(body, 'model_seq_id')}"

        async def create() -> Result:
            await self._load_model(name, shape)
            _, made = self._find(name)
            made.load(folder, optimizer=bool(body.get("optimizer")))
            return {"type": "load_weights", "path": body["path"], "model_id": name}

        return self._promise(f"{name}-create", create, name)

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        if body.get("kind", "snapshot") != "snapshot":
            raise TinkerRequestError(f"sampling while weights change (kind={body['kind']!r}) is not served here; use snapshots")
        client, model = self._find(_text(body, "model_id"))
        given = _optional_text(body, "path")

        def save() -> Result:
            name = given or f"sampler-{body['seq_id']:06d}"
            address, folder = self.folders.new(body["model_id"], "sampler_weights", name, client.shape)
            model.save_for_sampler(folder)
            if given:
                return {"type": "save_weights_for_sampler", "path": address}
            session = f"{body['model_id']}-sampler-{body.get('sampling_session_seq_id', body['seq_id'])}"
            self._sampling[session] = address
            return {"type": "save_weights_for_sampler", "path": address, "sampling_session_id": session}

        return self._in_order(body, save)

    def _in_order(self, body: Mapping[str, Any], work: Callable[[], Result]) -> web.Response:
        return self._call(_text(body, "model_id"), _whole(body, "seq_id"), work)

    def _call(self, name: str, number: int, work: Callable[[], Result]) -> web.Response:
        order = self._find(name)[0].order
        return self._promise(f"{name}-call-{number}", lambda: order.run(number, work), name)

    # --- sampling --------------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        if (address := _optional_text(body, "model_path")) is not None:
            self.folders.find(address)
        else:
            self._check_base(body.get("base_model"))
        session = f"{_text(body, 'session_id')}-sampling-{_whole(body, 'sampling_session_seq_id')}"
        self._sampling[session] = address
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": session})

    async def _sample(self, request: web.Request) -> web.Response:
        body = await read_json_object(request)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if body.get(name):
                raise TinkerRequestError(
                    f"{name} is not served here; prompt_logprobs and the log-probabilities of sampled tokens are"
                )
        session = _optional_text(body, "sampling_session_id")
        if session is not None and session not in self._sampling:
            raise TinkerRequestError(f"there is no sampling session {session!r} here")
        address = self._sampling[session] if session is not None else _optional_text(body, "model_path")
        name = f"{session}-sample-{_whole(body, 'seq_id')}" if session is not None else f"sample-{uuid.uuid4().hex}"
        call = self._read_sample(body, name)

        async def sample() -> Result:
            completions, prompt_logprobs = await self.sampler.sample(address, call)
            return write_samples(completions, prompt_logprobs)

        return self._promise(name, sample, sample_sequence_ids=[f"{name}-{index}" for index in range(call.count)])

    def _read_sample(self, body: Mapping[str, Any], name: str) -> SampleCall:
        params, count = _mapping(body, "sampling_params"), body.get("num_samples", 1)
        if not is_whole(count, 1, MAX_SAMPLES):
            raise TinkerRequestError(f"num_samples is {shown(count)}; it must be 1 to {MAX_SAMPLES}")
        stop, top_k, seed = params.get("stop"), params.get("top_k", -1), params.get("seed")
        if stop == []:
            raise TinkerRequestError("stop=[] asks to go on after the end of a text, which is not served here")
        stops = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(stops, list) or not all(isinstance(each, str) or is_whole(each, 0, MAX_COUNT) for each in stops):
            raise TinkerRequestError(f"stop is {shown(stop)}; it must be a text, or a list of texts or of token ids")
        try:
            sampling = Sampling(
                temperature=params.get("temperature", 1.0),
                top_k=None if top_k in (-1, 0, None) else top_k,
                top_p=params.get("top_p", 1.0),
                max_new_tokens=self.length if params.get("max_tokens") is None else params["max_tokens"],
                stop_strings=tuple(each for each in stops if isinstance(each, str)),
                stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
            )
        except ValueError as error:
            raise TinkerRequestError(str(error)) from error
        prompt, seed = _read_prompt(body), mix_seed(*name.encode()) if seed is None else seed
        check_request(prompt, sampling, seed, length=self.length)
        return SampleCall(
            prompt=prompt, sampling=sampling, count=count, seed=seed, prompt_logprobs=bool(body.get("prompt_logprobs"))
        )

    # --- results ---------------------------------------------------------------------------------------------------------

    def _promise(self, name: str, work: Callable[[], Awaitable[Result]], model: str | None = None, **more: Any) -> web.Response:
        return web.json_response({"request_id": self.promises.start(name, work), "model_id": model, **more})

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = _text(await read_json_object(request), "request_id")
        try:
            result = await self.promises.retrieve(name)
        except KeyError:
            return web.json_response({"detail": f"there is no request {name!r} here"}, status=410)
        if result is None:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"})
        return web.Response(body=result, content_type=CONTENT_TYPE) if isinstance(result, bytes) else web.json_response(result)


def _answer_error(error: Exception, request: web.Request) -> web.Response | None:
    if not isinstance(error, BadRequest | TinkerRequestError | InvalidRequest):
        return None
    return web.json_response({"detail": str(error)}, status=error.status if isinstance(error, BadRequest) else 422)


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise TinkerRequestError(f"{name} is {shown(value)}; it must be a text")
    return value


def _optional_text(body: Mapping[str, Any], name: str) -> str | None:
    return None if body.get(name) in (None, "") else _text(body, name)


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a body; empty if it is missing."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise TinkerRequestError(f"{name} is {shown(value)}; it must be a JSON object")
    return value


def _whole(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not is_whole(value, 0, MAX_COUNT):
        raise TinkerRequestError(f"{name} is {shown(value)}; it must be a whole number")
    return int(value)


def _read_prompt(body: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt, which an engine checks."""
    chunks = _mapping(body, "prompt").get("chunks", [])
    if not isinstance(chunks, list) or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise TinkerRequestError("prompt.chunks must be a list of JSON objects")
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise TinkerRequestError("only text can be sampled from here: the prompt has a chunk of an image or of sound")
    if not all(isinstance(chunk.get("tokens"), list) for chunk in chunks):
        raise TinkerRequestError("each chunk of a prompt must have tokens, a list of token ids")
    return [token for chunk in chunks for token in chunk["tokens"]]


def _read_shape(config: Mapping[str, Any]) -> AdapterShape:
    rank, seed = config.get("rank", 32), config.get("seed") or 0
    if not is_whole(rank, 1, MAX_RANK):
        raise TinkerRequestError(f"the rank of the adapters is {shown(rank)}; it must be 1 to {MAX_RANK}")
    if not is_whole(seed, 0, 2**63 - 1):
        raise TinkerRequestError(f"the seed of the adapters is {shown(seed)}; it must be a whole number")
    layers = {name: bool(config.get(name, True)) for name in ("train_mlp", "train_attn")}
    return AdapterShape(rank=rank, seed=seed, **layers)
