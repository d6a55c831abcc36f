"""Convert a sharded checkpoint to a Hugging Face folder, with NeMo-RL's arguments. `strop export CHECKPOINT OUT` does it for any layout.

python examples/converters/convert_dcp_to_hf.py --config results/grpo/step_170/config.yaml \\
    --dcp-ckpt-path results/grpo/step_170/policy/weights --hf-ckpt-path results/grpo/hf
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.extensions.export.convert import convert_shards, read_model_name


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Run the conversion. Returns an error message, or None on success."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="the run's config.yaml, which names the model if the shards do not")
    parser.add_argument("--dcp-ckpt-path", type=Path, required=True, help="the folder of shards, such as step_170/policy/weights")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="the folder to write")
    given = parser.parse_args(arguments)
    try:
        name = read_model_name(given.config) if given.config else None
        convert_shards(given.dcp_ckpt_path, given.hf_ckpt_path, model_name=name)
    except (ValueError, OSError) as error:
        return f"error: {error}"
    print(f"saved the model and its tokenizer to {given.hf_ckpt_path}")
    return None


if __name__ == "__main__":
    sys.exit(main())
