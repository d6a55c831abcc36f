"""``strop serve``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop import plugins
from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, add_choice_of_weights, print_interrupted

if TYPE_CHECKING:
    from strop.extensions.serve.serve_model import ModelService

API_KEY_VARIABLE = "STROP_API_KEY"


def serve(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop serve``. Return its exit code."""
    own, extra = _split_at_dashes(arguments)
    parser = make_serve_parser()
    options = parser.parse_args(own)
    if options.max_model_len is not None and options.max_model_len < 2:
        parser.error(
            f"--max-model-len: found {options.max_model_len}; it must be at least 2, one token of prompt and one of completion"
        )

    from strop.checkpointing.saved_model import SavedModelNotFound, find_saved_model

    try:
        model = find_saved_model(options.checkpoint, step=options.step, best=options.best, ema=options.ema)
        from strop.extensions.serve.serve_model import ServeJob, run_server

        job = ServeJob(
            model=model,
            name=options.served_model_name or options.checkpoint,
            host=options.host,
            port=options.port,
            api_key=options.api_key or os.environ.get(API_KEY_VARIABLE) or None,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            engine=options.engine,
            merge=options.merge,
            kv_cache_gb=options.kv_cache_gb,
            extra=extra,
            service=next((service for name, service in _load_services().items() if vars(options)[name]), None),
            options=vars(options),
        )
        return run_server(job)
    except SavedModelNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return print_interrupted(f"Nothing is served yet. Start it again:\n    {command_line}")


def make_serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop serve",
        description="Serve a checkpoint over OpenAI's HTTP API: by vLLM where it is installed, else by the torch engine.",
        epilog="Arguments after -- go to vLLM's server.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_N folder, a run (its newest checkpoint), or any model")
    add_choice_of_weights(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 is any free one (default: %(default)s)")
    parser.add_argument("--api-key", help=f"key that requests must have (default: ${API_KEY_VARIABLE}, if it is set)")
    parser.add_argument("--engine", choices=("auto", "torch", "vllm"), default="auto", help="auto is vllm where it is installed")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="data type of the weights"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and completion together (tokens)")
    parser.add_argument("--served-model-name", metavar="NAME", help="name of the model in requests (default: CHECKPOINT)")
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters; without it vLLM serves them over their base")
    parser.add_argument(
        "--kv-cache-gb", type=float, default=2.0, help="memory of the torch engine's KV cache (default: %(default)s GiB)"
    )
    for service in _load_services().values():
        service.add_arguments(parser)
    return parser


def _load_services() -> dict[str, ModelService]:
    return {name: plugins.load("services", name) for name in sorted(plugins.declared("services"))}


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line at ``--``."""
    found = list(arguments)
    place = found.index("--") if "--" in found else len(found)
    return found[:place], tuple(found[place + 1 :])


SERVE = Command(serve, "answer OpenAI's HTTP API with a checkpoint", group="use")
