"""What one SGLang engine is launched with, and the arguments of its server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.extensions.sglang.server.cpu_stub import CPU_ENVIRONMENT
from strop.extensions.sglang.server.engine_calls import WEIGHTS_VARIABLE
from strop.extensions.sglang.server.seeded_sampler import SAMPLER_VARIABLE
from strop.extensions.sglang.sglang_config import SglangConfig
from strop.generation.engine_launch import EngineLaunch, LaunchedAdapters
from strop.generation.vllm.launch import DRIVER_PID_VARIABLE
from strop.safety.remote_code import trusts_remote_code

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
        """The number of processes that receive weights from the learner: the ranks, or this one for SGLang's own ways."""
        options = self.options
        return options.engine_size if options.weight_loading == "direct" else 1

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
