"""What one SGLang server is launched with, its processes, which end together, and requests to it over HTTP."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from strop.extensions.sglang.server.cpu_stub import CPU_ENVIRONMENT
from strop.extensions.sglang.server.engine_calls import WEIGHTS_VARIABLE
from strop.extensions.sglang.server.seeded_sampler import SAMPLER_VARIABLE
from strop.extensions.sglang.server.server_entry import REFUSED_PREFIX, REFUSED_STATUS
from strop.extensions.sglang.sglang_config import SglangConfig, find_cpu_problems
from strop.generation.engine_launch import EngineLaunch, LaunchedAdapters
from strop.generation.vllm.launch import DRIVER_PID_VARIABLE
from strop.models.local_files import read_local_config
from strop.problems import raise_problems
from strop.safety.remote_code import trusts_remote_code

if TYPE_CHECKING:
    import aiohttp


CPU_TOTAL_TOKENS = 32_768  # of the KV cache on a CPU, where SGLang would take a share of the machine's memory
RESERVED_ARGUMENTS = {  # SGLang's arguments that Strop sets itself -> what to set instead
    "model_path": "policy.model_name",
    "tokenizer_path": "policy.tokenizer.name",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "dtype": "policy.generation.sglang_cfg.dtype",
    "random_seed": "grpo.seed: every request has its own seed",
    "context_length": "policy.generation.sglang_cfg.context_length",
    "tp_size": "policy.generation.sglang_cfg.tp_size",
    "pp_size": "policy.generation.sglang_cfg.tp_size: weights reach one pipeline stage",
    "dp_size": "policy.generation.sglang_cfg.num_engines",
    "ep_size": "policy.generation.sglang_cfg.ep_size",
    "enable_lora": "policy.dtensor_cfg.lora_cfg.enabled",
    "lora_paths": "nothing: the learner sends the adapters",
    "max_lora_rank": "policy.dtensor_cfg.lora_cfg.dim",
    "lora_target_modules": "policy.dtensor_cfg.lora_cfg.target_modules",
    "max_loras_per_batch": "nothing: all requests use the policy's adapter",
    "host": "nothing: the server is asked from this machine only",
    "port": "nothing: a free one is taken",
    "api_key": "nothing: every engine has its own key",
    "load_format": "nothing: the learner sends the weights",
    "weight_version": "nothing: the run counts them",
    "quantization": "nothing: rollouts use the trained weights unquantized",
    "device": "policy.device",
}


DECODER_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)  # where the adapters' are not known
ADAPTER_NAME = "policy"  # of the only adapter


def write_empty_adapter(adapters: LaunchedAdapters, folder: Path) -> dict[str, Any]:
    """Write what SGLang reads of an adapter that has no matrices until the first publish, and return its arguments for it."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = sorted({name.rpartition(".")[2] for name in adapters.layers or DECODER_LAYERS})
    config = {"peft_type": "LORA", "r": adapters.rank, "lora_alpha": adapters.rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": layers,
        "lora_paths": [{"lora_name": ADAPTER_NAME, "lora_path": str(folder), "pinned": True}],
        "max_loras_per_batch": 2,  # this one, and requests without any
    }


@dataclass(frozen=True, kw_only=True)
class SglangLaunch(EngineLaunch):
    """What one SGLang engine is launched with."""

    model_weights: str = ""  # module:Class that takes the place of ``ModelWeights`` in the engine's processes

    @property
    def options(self) -> SglangConfig:
        return SglangConfig.of(self.config)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Further arguments of the server."""
        given: Mapping[str, Any] = vars(self.config)["sglang_kwargs"]
        return given

    @property
    def python(self) -> str:
        """The interpreter of the engine's processes."""
        return self.options.interpreter

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment variables of the engine's processes, in addition to this process's."""
        options = self.options
        source = Path(__file__).parents[3]
        found = [] if source.name == "site-packages" else [str(source)]  # where Strop is, unless that environment has it
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        own = {
            "PYTHONPATH": os.pathsep.join([*found, *inherited]),
            SAMPLER_VARIABLE: options.sampler,
            WEIGHTS_VARIABLE: self.model_weights,
            DRIVER_PID_VARIABLE: str(os.getpid()),
            "PYTHONWARNINGS": "ignore",
            **(CPU_ENVIRONMENT if self.on_cpu else {}),
        }
        given = {**self.environment, **options.env_vars}
        if "PYTHONPATH" in given:
            own["PYTHONPATH"] = os.pathsep.join([own["PYTHONPATH"], given["PYTHONPATH"]])
        return {**given, **own}

    @property
    def receivers(self) -> int:
        """The number of processes that receive weights from the learner: the ranks."""
        return self.options.engine_size

    def check(self) -> None:
        make_server_arguments(self, port=0, key="")

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives its GPU memory up while the learner works."""
        return not self.on_cpu and self.config.colocated.enabled and self.options.sglang_server_config.needs_offload


def make_server_arguments(launch: SglangLaunch, *, port: int, key: str) -> dict[str, Any]:
    """Return the arguments of SGLang's server by name. Raises ValueError for those that Strop sets itself, and for drafts on a CPU."""
    options, further = launch.options, launch.arguments
    for name in further:
        if name in RESERVED_ARGUMENTS:
            raise ValueError(
                f"policy.generation.sglang_kwargs.{name}: Strop sets this argument of SGLang itself; set {RESERVED_ARGUMENTS[name]}"
            )
    if launch.on_cpu and (options.speculative_algorithm or further.get("speculative_algorithm")):
        raise ValueError(
            "policy.generation.sglang_cfg.speculative_algorithm: found "
            f"{options.speculative_algorithm or further['speculative_algorithm']}, but on a CPU SGLang accepts drafts "
            "greedily whatever the temperature is, by a kernel that its wheel does not have; set it to null, or policy.device to a GPU"
        )
    if launch.on_cpu:
        raise_problems(find_cpu_problems(read_local_config(launch.model), "policy.generation"))
    arguments: dict[str, Any] = {
        "model_path": launch.model,
        "tokenizer_path": launch.tokenizer or launch.model,
        "host": "127.0.0.1",
        "port": port,
        "api_key": key,
        "load_format": "auto" if launch.load_weights else "dummy",
        "dtype": options.dtype,
        "context_length": options.context_length,
        "tp_size": options.tp_size,
        "pp_size": options.pp_size,
        "dp_size": options.dp_size,
        "ep_size": options.ep_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "disable_radix_cache": options.disable_radix_cache,
        "disable_cuda_graph": options.disable_cuda_graph or launch.on_cpu,
        "trust_remote_code": trusts_remote_code(),
        "random_seed": 0,
        "skip_server_warmup": True,
        "log_level": "warning",
        "weight_version": "-1",
        "allow_auto_truncate": False,
    }
    if launch.on_cpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        arguments |= {"disable_overlap_schedule": True, "max_total_tokens": CPU_TOTAL_TOKENS}
        arguments |= {"sleep_on_idle": True}  # an idle scheduler would poll, and take a core from the learner
        arguments |= {"lora_backend": "torch_native"} if launch.adapters is not None else {}
    elif options.sampler == "strop":
        arguments["sampling_backend"] = "pytorch"
    if launch.sleeps:
        backup = options.sglang_server_config.cpu_weight_backup
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": backup}
    return {**arguments, **options.server_arguments, **further}


OUTPUT_TAIL_LINES = 12  # lines of an engine's output in the message about its death
END_SECONDS = 3.0  # that a server has to end by itself


class ServerProcess:
    """A server of SGLang on this machine. It listens on a free port of the loopback interface and answers to one secret key."""

    def __init__(self, launch: SglangLaunch) -> None:
        self.launch = launch
        self.key = secrets.token_urlsafe(32)
        self.port = _free_port()
        # SGLang leaves the files of its sockets behind, in the folder for temporary files
        self.folder = Path(tempfile.mkdtemp(prefix="strop-sglang-"))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        launch, output = self.launch, self._open_output()
        arguments = make_server_arguments(launch, port=self.port, key=self.key)
        if launch.adapters is not None:
            arguments |= write_empty_adapter(launch.adapters, self.folder / "adapter")
        options = {"arguments": arguments}
        try:
            process = subprocess.Popen(
                [launch.python, "-W", "ignore", "-m", "strop.extensions.sglang.server.server_entry"],
                env={**os.environ, **launch.env_vars, "TMPDIR": str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
        finally:
            if output is not None:
                output.close()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the caller will see
            json.dump(options, process.stdin)
            process.stdin.close()
        return process

    def _open_output(self) -> IO[Any] | None:
        if (file := self.launch.output_file) is None:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("a")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def refusal(self) -> str:
        """Why the server refused its options; empty if it did not."""
        if self._process.poll() != REFUSED_STATUS:
            return ""
        lines = [line for line in self._output_lines() if line.startswith(REFUSED_PREFIX)]
        return lines[-1].removeprefix(REFUSED_PREFIX) if lines else "it does not say why"

    def describe_end(self) -> str:
        """Return the last lines of the output of the server's processes, as the end of a message."""
        lines = self._output_lines()[-OUTPUT_TAIL_LINES:]
        return f"; the end of {self.launch.output_file}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""

    def _output_lines(self) -> list[str]:
        file = self.launch.output_file
        return [] if file is None or not file.exists() else file.read_text(errors="replace").splitlines()

    def end(self) -> None:
        """End every process of the server. Blocks for up to a few seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Seconds that an unused connection is kept: less than the 5 after which SGLang's server closes it, perhaps while a request is being sent.
KEEP_ALIVE = 2.0


class ServerError(RuntimeError):
    """The server answered that it cannot do what was asked; the message is its own."""


class ServerClient:
    """A client of one server. Bound to the event loop that it is first used on."""

    def __init__(self, port: int, key: str) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                self.address,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),  # a completion takes as long as it takes
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                read_bufsize=1 << 20,
            )
        return self._session

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer. Raises ServerError, and OSError or aiohttp.ClientError if the connection fails."""
        async with self._open().post(path, json=body or {}) as response:
            answer = (
                await response.json(content_type=None) if response.content_type == "application/json" else await response.text()
            )
            if response.status != 200:
                raise ServerError(f"{path}: {_read_message(answer)} (status {response.status})")
            return answer

    async def is_ready(self) -> bool:
        """Whether the server takes requests."""
        import aiohttp

        try:
            async with self._open().get("/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (OSError, TimeoutError, aiohttp.ClientError):
            return False

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _read_message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(answer)
