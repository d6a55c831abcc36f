"""Convert a Hugging Face model to a checkpoint of Megatron Core (torch_dist), which any layout of ranks reads.

python examples/converters/convert_hf_to_megatron.py --hf-model-name Qwen/Qwen3-1.7B --megatron-ckpt-path results/qwen3_megatron

writes results/qwen3_megatron with config.json, tokenizer and iter_0000000, for Megatron-LM and NeMo-RL. A run of Strop does not need it:
ranks of Megatron Core read their parts of a Hugging Face folder themselves.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.extensions.megatron.checkpoint.convert_megatron import convert_to_megatron


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Run the conversion. Returns an error message, or None on success."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hf-model-name", required=True, help="a folder, or a model on the hub")
    parser.add_argument("--megatron-ckpt-path", type=Path, required=True, help="the folder to write")
    given = parser.parse_args(arguments)
    try:
        convert_to_megatron(given.hf_model_name, given.megatron_ckpt_path)
    except (ValueError, OSError) as error:
        return f"error: {error}"
    print(f"saved {given.megatron_ckpt_path / 'iter_0000000'}")
    return None


if __name__ == "__main__":
    sys.exit(main())
