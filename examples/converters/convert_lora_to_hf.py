"""Write adapters that Megatron Core trained as a Hugging Face model, or in PEFT's format, with NeMo-RL's arguments.

python examples/converters/convert_lora_to_hf.py --adapter-ckpt results/grpo/step_170/policy/weights \\
    --hf-model-name Qwen/Qwen3-1.7B --hf-ckpt-path results/grpo/merged

`strop export CHECKPOINT OUT --merge` does it too. It also reads what NeMo-RL saves (iter_XXXXXXX with run_config.yaml): one process, no
GPU, no Megatron.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.extensions.megatron.checkpoint.convert_megatron import convert_megatron_adapters


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Run the conversion. Returns an error message, or None on success."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--base-ckpt", type=Path, help="the base in Megatron Core's format; without it the weights of --hf-model-name"
    )
    parser.add_argument(
        "--adapter-ckpt", type=Path, required=True, help="such as step_170/policy/weights, or iter_XXXXXXX of NeMo-RL"
    )
    parser.add_argument("--hf-model-name", required=True, help="the model that the adapters are for")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="the folder to write")
    parser.add_argument("--adapter-only", action="store_true", help="write the adapters in PEFT's format; do not merge them")
    given = parser.parse_args(arguments)
    try:
        convert_megatron_adapters(
            given.adapter_ckpt,
            given.hf_ckpt_path,
            model_name=given.hf_model_name,
            base=given.base_ckpt,
            merge=not given.adapter_only,
        )
    except (ValueError, OSError) as error:
        return f"error: {error}"
    print(f"saved the {'adapters' if given.adapter_only else 'merged model'} to {given.hf_ckpt_path}")
    return None


if __name__ == "__main__":
    sys.exit(main())
