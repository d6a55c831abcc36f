"""``strop serve``: an OpenAI-compatible server for a checkpoint, by vLLM or over the torch engine, or another service of an extension."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop import packages
from strop.base_config import validate_section
from strop.checkpointing.saved_model import SavedModel
from strop.device_copies import is_gpu
from strop.extensions.export.convert import loadable_folder
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_torch_engine
from strop.learner.model_config import ModelConfig
from strop.models.adapters import base_model_name, read_adapter_config
from strop.packages import install_command
from strop.runs.exit_codes import run_command
from strop.runs.models import LoadedPolicy, load_policy, resolve_device
from strop.safety.site_guard import is_loopback

DEFAULT_LENGTH = 8192  # tokens of prompt and completion, if the model allows more
VLLM_SERVER = "vllm.entrypoints.openai.api_server"


class ModelService(Protocol):
    """What ``strop serve --NAME`` serves in place of OpenAI's API: an entry point NAME of the group ``strop.services``."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the option ``--NAME``, which chooses the service, and its further ones."""
        ...

    def check(self, job: ServeJob) -> None:
        """Raise ValueError for what cannot be served."""
        ...

    def make_app(self, job: ServeJob, model: dict[str, Any], length: int) -> tuple[Any, str]:
        """Return the application of aiohttp, and what is said once it listens, with {} for its address.

        ``model``: options of ``ModelConfig`` that load the model. ``length``: longest prompt and completion together (tokens)."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServeJob:
    """What to serve, where, and with which engine."""

    model: SavedModel
    name: str  # of the model, in requests
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    engine: str = "auto"
    merge: bool = False
    kv_cache_gb: float = 2.0
    extra: tuple[str, ...] = ()  # arguments of vLLM's server
    service: ModelService | None = None  # in place of OpenAI's API
    options: Mapping[str, Any] = field(default_factory=dict)  # of the command line, for the service

    @property
    def uses_vllm(self) -> bool:
        return self.engine == "vllm" or (self.service is None and self.engine == "auto" and packages.is_installed("vllm"))

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The chat template set by the model's run."""
        section = self.model.run_values.get("policy", {}).get("tokenizer") or {}
        return {name: section[name] for name in ("chat_template", "chat_template_kwargs") if section.get(name) is not None}


def run_server(job: ServeJob) -> int:
    """Serve until Ctrl-C or SIGTERM. Return 0 then, 1 after printing an error."""
    code: list[int] = []
    return run_command(_serve(job, code)) or (code[0] if code else 0)


async def _serve(job: ServeJob, code: list[int]) -> None:
    _check_job(job)
    if job.api_key is None and not is_loopback(job.host):
        print(
            f"warning: {job.host} is reachable from other machines, and no --api-key is set: anyone who can reach port {job.port} can use "
            "the model",
            file=sys.stderr,
        )
    with loadable_folder(job.model, _say, merge=job.merge and job.uses_vllm) as folder:
        if job.service is not None:
            app, announcement = job.service.make_app(job, _model_section(job, folder), job.max_model_len or DEFAULT_LENGTH)
            await _run_app(job, app, announcement)
        elif job.uses_vllm:
            code.append(_run_vllm(job, folder, is_temporary=folder != job.model.weights))
        else:
            await _serve_torch(job, folder)


def _check_job(job: ServeJob) -> None:
    """Raise ValueError for a job that cannot be served."""
    if job.model.layout == "value head" or _is_classifier(job.model):
        raise ValueError(
            f"{job.model.weights} is a reward model or critic, which scores texts and does not write any; serve a policy"
        )
    if job.service is not None:
        job.service.check(job)
    if job.engine == "vllm" and not packages.is_installed("vllm"):
        raise ValueError(
            "--engine vllm: vLLM is not installed; `make setup-vllm` in Strop's checkout installs it, or use --engine torch"
        )
    if not job.uses_vllm and not packages.is_installed("aiohttp"):
        raise ValueError(f"the server over the torch engine needs the package aiohttp: {install_command('serve')}, or vllm")
    if not job.uses_vllm and job.dtype == "float16":
        raise ValueError("--dtype float16 is not in the torch engine; use bfloat16 or float32, or --engine vllm")
    if not job.uses_vllm and job.extra:
        raise ValueError(f"{' '.join(job.extra)}: arguments after -- are passed to vLLM; use --engine vllm")


def _is_classifier(model: SavedModel) -> bool:
    folder = Path(model.weights)
    if model.layout == "adapters":
        return bool(read_adapter_config(folder).get("task_type") == "SEQ_CLS")
    path = folder / "config.json"
    names = json.loads(path.read_text()).get("architectures") if path.is_file() else None
    return any("ForSequenceClassification" in name for name in names or ())


# --- vLLM ----------------------------------------------------------------------------------------------------------------


def vllm_arguments(job: ServeJob, folder: str) -> list[str]:
    """Return the command of vLLM's own server. The key is passed in its environment, because other users can read command lines."""
    arguments = [sys.executable, "-m", VLLM_SERVER, "--model"]
    if job.model.layout == "adapters" and folder == job.model.weights:
        rank = read_adapter_config(Path(folder)).get("r", 16)
        arguments += [base_model_name(Path(folder)), "--enable-lora", "--lora-modules", f"{job.name}={folder}"]
        arguments += ["--max-lora-rank", str(next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank))]
        arguments += ["--tokenizer", folder] if (Path(folder) / "tokenizer_config.json").exists() else []
    else:
        arguments += [folder, "--served-model-name", job.name]
    arguments += ["--host", job.host, "--port", str(job.port), "--dtype", job.dtype]
    arguments += ["--max-model-len", str(job.max_model_len)] if job.max_model_len is not None else []
    template = job.tokenizer.get("chat_template")
    arguments += ["--chat-template", template] if template not in (None, "default") else []
    return [*arguments, *job.extra]


def _run_vllm(job: ServeJob, folder: str, *, is_temporary: bool) -> int:
    """Replace this process by vLLM's server; with a temporary folder, start it as a child, so that this process can remove the
    folder afterwards.
    """
    if job.api_key is not None:
        os.environ["VLLM_API_KEY"] = job.api_key
    command = vllm_arguments(job, folder)
    _say(f"starting vLLM's server: {' '.join(command[2:])}")
    sys.stdout.flush()
    if not is_temporary:
        os.execv(command[0], command)
    process = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: process.send_signal(received))
    return process.wait()


# --- the torch engine ----------------------------------------------------------------------------------------------------


async def _serve_torch(job: ServeJob, folder: str) -> None:
    """Serve until a stop signal. Raises ValueError, OSError."""
    from strop.extensions.serve.chat_server import ChatServer
    from strop.extensions.serve.completion_request import RequestReader

    _say(f"loading {job.model.description}")
    policy = _load(job, folder)
    length = _choose_length(job, policy)
    engine = make_torch_engine(
        policy.network,
        policy.tokenizer,
        validate_section(TorchGenerationConfig, {"kv_cache_memory_gb": job.kv_cache_gb}),
        length=length,
        stop_ids=policy.stop_ids,
    )
    engine.resume(0)
    app = ChatServer(engine, RequestReader(job.name, policy.template, length), job.api_key, job.host).make_app()
    about = f"with the torch engine, {length} tokens of prompt and completion"
    try:
        await _run_app(job, app, f"serving {job.name} on {{}}/v1 {about}")
    finally:
        await engine.close()


async def _run_app(job: ServeJob, app: Any, announcement: str) -> None:
    """Serve until a stop signal; {} in the announcement is the address. Raises OSError."""
    from strop.safety.http_server import listening, stop_event

    stopped = stop_event()
    async with listening(app, (job.host, job.port), settings="--port or --host") as address:
        _say(f"{announcement.format(address)}; Ctrl-C stops it")
        await stopped.wait()
    _say("stopped")


def _load(job: ServeJob, folder: str) -> LoadedPolicy:
    return load_policy(validate_section(ModelConfig, _model_section(job, folder)))


def _model_section(job: ServeJob, folder: str) -> dict[str, Any]:
    """Return the options of ``ModelConfig`` that load the model."""
    precision = job.dtype
    if precision == "auto":
        precision = "bfloat16" if is_gpu(resolve_device("auto")) else "float32"
    tokenizer = {"name": folder, **job.tokenizer}
    return {
        "model_name": folder,
        "precision": precision,
        "weights_dtype": precision,
        "tokenizer": tokenizer,
        "dequantize_base_checkpoint": True,
        "max_total_sequence_length": job.max_model_len or DEFAULT_LENGTH,
    }


def _choose_length(job: ServeJob, policy: LoadedPolicy) -> int:
    most = getattr(policy.network.model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_LENGTH
    if job.max_model_len is not None and job.max_model_len > most:
        raise ValueError(
            f"--max-model-len: found {job.max_model_len}, and the model has positions for {most} tokens; set it to that or less"
        )
    return int(job.max_model_len or min(most, DEFAULT_LENGTH))


def _say(text: str) -> None:
    print(text, flush=True)
