"""What the server of ``support.forks`` imports and does once, so that its forks need not: each would import 500 modules of Strop.

It starts no thread, draws no random number and reads no file but those of the packages: a fork begins as a new interpreter would.
"""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OTHERS = [
    "omegaconf",
    "pandas",
    "peft",
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "pytest",  # that is where the helpers of the tests are imported
    "ruamel.yaml",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "transformers.conversion_mapping",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.tokenization_utils_fast",
    "xxhash",
]
STROP = [
    "strop.runs.dry_run.examine",
    "strop.runs.train",  # with all that it builds
    "strop.cli",
    "strop.config",
    "strop.environments.arithmetic",
    "strop.monitoring.trackers.jsonl",
]
OF_EACH_RUN = ("listeners", "resources")  # what extensions bring


# with hypothesis; what ranks of processes train, of which some are of Megatron Core
OF_EXTENSIONS = ["support.parity", "strop.extensions.evaluation.evaluate", "strop.extensions.reading.plot"]
HELPERS = OF_EXTENSIONS if find_spec("strop.extensions") else []


def list_algorithms() -> list[str]:
    """The modules that the catalogue imports when an algorithm is named."""
    spec = find_spec("strop.algorithms")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py") if file.stem != "__init__"]
    return sorted(".".join(["strop.algorithms", *file.parts]) for file in files)


def list_attached() -> list[str]:
    from strop import plugins

    return [point.module for group in OF_EACH_RUN for point in plugins.declared(group).values()]


def fill_caches() -> None:
    """transformers compiles a thousand patterns when it first loads weights; what packages say of themselves is read for their versions."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from strop.monitoring.run_starts import find_versions

    get_checkpoint_conversion_mapping("llama")
    find_versions()


def load_one_of_each_kind() -> None:
    """pydantic makes the schema of a section when it is first used, and ruamel.yaml its tables."""
    from strop.config import TRAINING_RUNS, ConfigError, EvalRunConfig, load_config
    from strop.config.load.load import dump_config
    from support.learners import make_model_config

    for root in (*TRAINING_RUNS.values(), EvalRunConfig):
        try:
            loaded: Any = load_config(
                None, ["policy.model_name=model", "data.train.env_name=arithmetic"], root=root, has_gpus=False
            )
        except ConfigError:  # something else is required: the schemas are made nonetheless
            continue
        dump_config(loaded.config)
    make_model_config()  # a section that is made by itself has a schema of its own


gc.disable()
try:
    # strop.models before transformers: it lets that be imported beside a torchvision that does not fit torch
    for name in ("strop.models", *OTHERS, *STROP, *list_algorithms(), *list_attached(), *HELPERS):
        import_module(name)
except ImportError as error:  # of which the server would say nothing, and every run would import it all itself
    raise RuntimeError("tests/support/fork_preload.py names what is not there") from error
load_one_of_each_kind()
fill_caches()
gc.enable()
gc.collect()
gc.freeze()  # what is here stays: a fork neither looks through it for garbage nor copies its pages to do so
