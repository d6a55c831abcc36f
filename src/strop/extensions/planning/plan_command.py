"""``strop plan``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands import Command
from strop.cli.output import OVERRIDES_HELP, USAGE_ERROR, RunParser, plain_warnings, print_config_error
from strop.packages import assume_packages, describe_assumed

if TYPE_CHECKING:
    from strop.config import TrainingRunConfig
    from strop.extensions.planning.learner_memory import ModelSize
    from strop.extensions.planning.plan_inputs import PlannedDevice

THIS_MACHINE = "this"
GPUS_OF_A_NODE = 8  # where the configuration does not say


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop plan",
        description="Say what a run will need before it starts: memory by phase, and settings that would fit.",
        epilog="strop plan grpo.yaml --hardware h100 --devices 64\nstrop plan quickstart.yaml --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file of a training run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="a device of the table, such as h100; this: this machine's CPU (default: by the run)",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices, in nodes of cluster.gpus_per_node, or of 8")
    parser.add_argument("--node-memory", type=float, metavar="GIB", help="CPU memory of a node, which the plan then checks")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="config.json of the model, where the model is not here")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


@assume_packages()
def plan(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop plan``. Return 0, 1 for a run that does not fit, 2 for what cannot be planned."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.devices is not None and not 1 <= options.devices <= 1_000_000:
        parser.error("--devices takes a number from 1 to 1000000")
    if options.node_memory is not None and not 0 < options.node_memory < 1e12:
        parser.error("--node-memory takes a positive number")
    from strop.config import ConfigError

    try:
        made = _make(options)
        made = replace(made, assumptions=(*made.assumptions, *describe_assumed()))
    except ConfigError as error:
        return print_config_error(error)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    from strop.extensions.planning.make_plan import format_plan

    print(json.dumps(made.to_dict(), indent=1) if options.json else format_plan(made))
    return 0 if made.fits else 1


def _make(options: argparse.Namespace) -> Any:
    from strop.extensions.planning.make_plan import make_plan
    from strop.extensions.planning.run_plan_inputs import read_inputs

    config, notes = _load(options)
    device = _find_device(config, options.hardware)
    model = _read_model(config, options.model_config)
    inputs = read_inputs(config, model, device, _read_sizes_beside(config))
    if inputs.node is not None:
        inputs = replace(inputs, node=replace(inputs.node, memory_gib=options.node_memory))
    return make_plan(replace(inputs, assumptions=(*inputs.assumptions, *notes)))


def _load(options: argparse.Namespace) -> tuple[TrainingRunConfig, list[str]]:
    """Load the configuration of a training run of any kind, with the devices that are asked for, and return what they were taken to be.

    Raises ConfigError for what a run refuses, and ValueError."""
    from strop.config import load_config
    from strop.config.load.load import find_training_root
    from strop.config.source.yaml_source import read_config_file

    overrides, notes = list(options.overrides), []
    root = find_training_root(read_config_file(options.config).values, overrides)
    given: TrainingRunConfig = load_config(options.config, overrides, root=root, check=False).config
    if options.devices is not None:
        size, source = _find_node_size(given)
        per_node = min(options.devices, size)
        if options.devices % per_node:
            raise ValueError(
                f"--devices {options.devices}: found a number that is not a multiple of {size} GPUs of a node ({source}); set one that "
                "is, or cluster.gpus_per_node to the GPUs of a node"
            )
        overrides += [f"cluster.gpus_per_node={per_node}", f"cluster.num_nodes={options.devices // per_node}"]
        notes = [f"a node has {size} GPUs ({source})"]
        given = load_config(options.config, overrides, root=root, check=False).config
    has_gpus = _name_device(given, options.hardware) != THIS_MACHINE
    return load_config(options.config, overrides, root=root, has_gpus=has_gpus).config, notes


def _find_node_size(config: TrainingRunConfig) -> tuple[int, str]:
    """Return the GPUs of a node and where that is from. A configuration for one device says nothing of a node."""
    cluster = config.cluster
    if cluster.gpus_per_node * cluster.num_nodes > 1:
        return cluster.gpus_per_node, "cluster.gpus_per_node"
    return GPUS_OF_A_NODE, "the configuration is for one device, and says nothing of nodes"


def _read_model(config: TrainingRunConfig, file: Path | None) -> ModelSize:
    """Read the sizes of the policy. Raises UnknownDimensions, ModelNotFound, OSError."""
    from strop.extensions.planning.learner_memory import ModelSize
    from strop.models.loading import ModelNotFound
    from strop.models.local_files import override_values

    name = config.policy.model_name
    if file is not None:
        values = json.loads(file.read_text(encoding="utf-8"))
    else:
        try:
            values = _read_config_json(name)
        except ModelNotFound as error:
            raise ValueError(f"{error}; or give its config.json with --model-config FILE") from error
    return ModelSize.from_config(name, override_values(values, config.policy.hf_config_overrides))


def _read_sizes_beside(config: TrainingRunConfig) -> dict[str, ModelSize]:
    """Read the sizes of a critic and of teachers that are not the policy's model. Those that are not here are left out."""
    from strop.extensions.planning.learner_memory import ModelSize
    from strop.extensions.planning.run_plan_inputs import SELF, list_beside
    from strop.models.loading import ModelNotFound

    found: dict[str, ModelSize] = {}
    for name in {*list_beside(config).values()} - {SELF, config.policy.model_name}:
        with suppress(ModelNotFound):
            found[name] = ModelSize.from_config(name, _read_config_json(name))
    return found


def _read_config_json(name: str) -> dict[str, Any]:
    from strop.models.loading import read_model_config

    with plain_warnings():
        values: dict[str, Any] = read_model_config(name).to_dict()
    return values


def _name_device(config: TrainingRunConfig, name: str | None) -> str:
    """Return the device that is asked for, else one of the table for a run on several, and this machine for one on a single device."""
    return name or ("h100" if config.cluster.gpus_per_node * config.cluster.num_nodes > 1 else THIS_MACHINE)


def _find_device(config: TrainingRunConfig, hardware: str | None) -> PlannedDevice:
    """Return the device of the table, or this machine. Raises ValueError."""
    from strop.extensions.performance.devices import device_named
    from strop.extensions.planning.plan_inputs import PlannedDevice
    from strop.hardware import total_memory

    if (name := _name_device(config, hardware)) == THIS_MACHINE:
        return PlannedDevice(name="this machine", memory_gib=total_memory() / 2**30, on_cpu=True)
    device = device_named(name)
    return PlannedDevice(name=device.name, memory_gib=device.memory_gib)


PLAN = Command(plan, "say whether a run fits: memory of devices and nodes, disk", group="check")
