"""Convert a checkpoint of Megatron Core to a Hugging Face folder, with NeMo-RL's arguments. `strop export CHECKPOINT OUT` does it too.

python examples/converters/convert_megatron_to_hf.py --config results/grpo/step_170/config.yaml \\
    --megatron-ckpt-path results/grpo/step_170/policy/weights/iter_0000000 --hf-ckpt-path results/grpo/hf

It also reads what Megatron-LM and NeMo-RL save (torch_dist): one process, one copy of the weights in memory, no GPU, no Megatron.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.extensions.export.convert import read_model_name
from strop.extensions.megatron.checkpoint.convert_megatron import convert_megatron


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Run the conversion. Returns an error message, or None on success."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="the run's config.yaml, which names the model if the checkpoint does not")
    parser.add_argument("--hf-model-name", help="the model whose configuration and tokenizer it has; overrides --config")
    parser.add_argument("--megatron-ckpt-path", type=Path, required=True, help="such as step_170/policy/weights/iter_0000000")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--no-strict", action="store_true", help="accepted: every family that can be converted is converted whole"
    )
    given = parser.parse_args(arguments)
    try:
        name = given.hf_model_name or (read_model_name(given.config) if given.config else None)
        convert_megatron(given.megatron_ckpt_path, given.hf_ckpt_path, model_name=name)
    except (ValueError, OSError) as error:
        return f"error: {error}"
    print(f"saved the model and its tokenizer to {given.hf_ckpt_path}")
    return None


if __name__ == "__main__":
    sys.exit(main())
