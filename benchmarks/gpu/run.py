"""A GPU's day: does it compute what the CPU computes, and how fast. One command of at most eight minutes, one table.

    python benchmarks/gpu/run.py --json gpu.json
    python benchmarks/gpu/run.py --device cpu --tiny         # tries the benchmark itself, in a minute

Needs PyTorch, Transformers and safetensors (and Triton, which PyTorch brings for CUDA), this checkout, and no network: models have
random weights. Without pydantic a stand-in takes its place (``pydantic_stand_in``). First parity: losses, gradients and the output layer
beside the CPU's, the embedded engine beside the learner, CUDA graphs, offload, NCCL on one device, memory. Then the learner's MFU at
0.5B, 1.5B and 8B shapes over contexts of 2k, 8k and 32k tokens, decoding against bandwidth, and seconds to publish. Each measurement has
its own time; one that fails is a row "failed: ...", the others go on, and the exit code is 1. It has not been run on a GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT / folder) for folder in ("src", "benchmarks", "benchmarks/gpu", "tests")]
sys.path[:0] = FOLDERS

from measurement import Measurement, Target, format_table, run_all, write_json  # noqa: E402
from pydantic_stand_in import install_if_missing  # noqa: E402


def list_measurements(sizes: Sequence[str]) -> list[Measurement]:
    """Return all measurements in the order of their rows."""
    import gpu_parity
    import gpu_speed

    parity = [
        Measurement("losses and gradients", gpu_parity.losses_and_gradients, 60),
        Measurement("output layer", gpu_parity.output_layer, 60),
        Measurement("sampler and learner", gpu_parity.sampler_and_learner, 60),
        Measurement("offload", gpu_parity.offload, 20),
        Measurement("collectives", gpu_parity.collectives, 40),
        Measurement("memory", gpu_parity.memory, 20),
    ]
    speed = [Measurement("the machine", gpu_speed.machine, 20)]
    for name in sizes:
        speed.append(Measurement(f"learner, {name}", gpu_speed.learner, 110 if name == "8B" else 50, (name,)))
        speed.append(Measurement(f"decoding, {name}", gpu_speed.decoding, 60, (name,)))
        speed.append(Measurement(f"publishing, {name}", gpu_speed.publishing, 30, (name,)))
    return parity + speed


def describe(device: str) -> str:
    import torch

    name = platform.machine() + " CPU" if device == "cpu" else torch.cuda.get_device_name()
    versions = []
    for package in ("torch", "transformers", "triton", "safetensors", "pydantic"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{name}; Python {platform.python_version()}, " + ", ".join(versions)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the benchmark itself")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of all measurements together (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B", "8B"], choices=["0.5B", "1.5B", "8B"], help="models")
    parser.add_argument("--only", help="measurements whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cpu" and not options.tiny:
        print("error: on a CPU the sizes of a GPU would take hours; add --tiny", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])  # for its processes
    stands_in = install_if_missing()
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; --device cpu --tiny tries the benchmark itself", file=sys.stderr)
        return 2
    measurements = [each for each in list_measurements(options.sizes) if (options.only or "") in each.name]
    heading = describe(options.device) + (", with a stand-in for pydantic" if stands_in else "")
    readings = list(run_all(measurements, Target(options.device, options.tiny), 60 * options.minutes))
    print(format_table(heading, readings))
    if options.json is not None:
        write_json(options.json, heading, readings)
    return int(not all(reading.ok for reading in readings))


if __name__ == "__main__":
    sys.exit(main())
