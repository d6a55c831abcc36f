"""Does GRPO teach a tiny model to use a calculator? Sums of two numbers that it cannot add, with and without the tool.

A Llama of three layers is taught by supervised fine-tuning on recorded calls to do two things equally often: call the calculator and repeat
its result, or answer at once, with a guess. Then GRPO rewards right answers only. What is measured, on held-out sums and for each seed: the
share of episodes that call, and the accuracy, before and after.

    python benchmarks/tool_use.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from common import save_llama

import strop

PREFIX, SUFFIX = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson + "}\n</tool_call>" }}'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALCULATOR = '''"""A calculator of sums."""


def calculator(expression: str) -> int:
    """Add numbers.

    Args:
        expression: Such as 12 + 7.
    """
    return sum(int(number) for number in expression.split("+"))
'''
LLAMA: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
}
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def build_model(folder: Path, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", "<|im_end|>", "<|im_start|>", "<|unk|>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.add_tokens([PREFIX, SUFFIX, "user\n", "assistant\n", "tool\n", "system\ncalculator"])
    wrapped.chat_template = TEMPLATE
    save_llama(folder, wrapped, seed, **LLAMA)


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations of which half call the calculator and half guess."""
    random = Random(seed)
    rows = []
    for index in range(count):
        numbers = [random.randint(10, 99) for _ in range(2)]
        question = {"role": "user", "content": "{} + {}=".format(*numbers)}
        if index % 2:
            rows.append({"messages": [question, {"role": "assistant", "content": str(random.randint(20, 198))}], "tools": [TOOL]})
            continue
        call = {"function": {"name": "calculator", "arguments": {"expression": "{} + {}".format(*numbers)}}}
        result = str(sum(numbers))
        replies = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]
        rows.append({"messages": [question, *replies, {"role": "assistant", "content": result}], "tools": [TOOL]})
    return rows


def warm_up(folder: Path, seed: int, steps: int) -> Path:
    build_model(folder / "untrained", seed)
    strop.train(
        "sft",
        model=folder / "untrained",
        data=demonstrations(64 * steps, seed),
        folder=folder / "sft",
        **{
            "sft.max_num_steps": steps,
            "sft.max_num_epochs": None,
            "sft.val_period": 0,
            "checkpointing.metric_name": None,
            "sft.seed": seed,
            "policy.train_global_batch_size": 64,
            "policy.optimizer.kwargs.lr": 2e-3,
            **COMMON,
        },
    )
    return folder / "sft" / "checkpoints" / f"step_{steps}" / "policy" / "weights"


COMMON: dict[str, Any] = {
    "policy.max_total_sequence_length": 96,
    "policy.precision": "float32",
    "policy.device": "cpu",
    "policy.num_threads": 1,
    "logger.console": "none",
}


def learn(folder: Path, model: Path, tool: Path, seed: int, steps: int, tools: bool) -> list[dict[str, float]]:
    """Train with GRPO, and return the validation metrics of each validated step."""
    strop.train(
        "grpo",
        model=model,
        folder=folder,
        **{
            "data.train.env_name": "sums",
            "data.validation.env_name": "sums",
            "data.validation.size": 128,
            "data.max_input_seq_length": 40,
            "env.sums.type": "arithmetic",
            "env.sums.min_operand": 10,
            "env.sums.max_operand": 99,
            "env.sums.wording": "{expression}=",
            "env.sums.tools": [f"{tool}:calculator"] if tools else [],
            "policy.generation.max_new_tokens": 16,
            "policy.generation.torch_cfg.kv_cache_memory_gb": 0.2,
            "policy.optimizer.kwargs.lr": 3e-4,
            "grpo.max_rollout_turns": 3,
            "grpo.num_prompts_per_step": 16,
            "grpo.num_generations_per_prompt": 8,
            "grpo.max_num_steps": steps,
            "grpo.max_num_epochs": None,
            "grpo.val_period": max(steps // 4, 1),
            "grpo.val_at_start": True,
            "grpo.seed": seed,
            "checkpointing.enabled": False,
            **COMMON,
        },
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"validation/accuracy": "accuracy", "validation/environments/sums/tool_calls": "tool_calls"}
    names["validation/environments/sums/malformed_tool_calls"] = "malformed"
    return [
        {"step": line["step"], **{short: round(line.get(name, 0.0), 4) for name, short in names.items()}}
        for line in lines
        if "validation/accuracy" in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-up-steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="strop-tool-use-"))
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "sum_tool.py"
    tool.write_text(CALCULATOR)
    gains = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        started = time.perf_counter()
        model = warm_up(folder / f"seed_{seed}", seed, arguments.warm_up_steps)
        warmed = time.perf_counter() - started
        curve = learn(folder / f"seed_{seed}" / "grpo", model, tool, seed, arguments.steps, tools=True)
        print(
            json.dumps(
                {"seed": seed, "warm_up_s": round(warmed), "total_s": round(time.perf_counter() - started), "curve": curve}
            )
        )
        first, last = curve[0], curve[-1]
        gains.append((first["accuracy"], last["accuracy"], first["tool_calls"], last["tool_calls"]))
    for name, column in zip(
        ("accuracy before", "accuracy after", "calls before", "calls after"), zip(*gains, strict=True), strict=True
    ):
        spread = f" ± {statistics.stdev(column):.3f}" if len(column) > 1 else ""
        print(f"{name:16} {statistics.fmean(column):.3f}{spread}")


if __name__ == "__main__":
    main()
