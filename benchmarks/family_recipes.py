"""NeMo-RL's recipes that name a family of 2025 and 2026, run for real on a CPU: a tiny random model of that family, two steps.

python benchmarks/family_recipes.py CHECKOUT                      every one; prints a table
python benchmarks/family_recipes.py CHECKOUT --only nanov3 --keep folder

Of a recipe stay the algorithm with its loss, the optimizer and its schedule, packing, checkpointing of activations, adapters. The
overrides of ``small`` replace models, data and environments, take the torch learner and the embedded engine, and cut sizes. The
fourth column is what becomes of the recipe as it is (`strop translate --all CHECKOUT/examples`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loop.kinds import DATA, GRADED, write_data
from loop.runs import strop
from loop.tiny import tiny_tokenizer
from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.library_recipe import find_format
from strop.extensions.recipes.translated_recipe import ExaminedRecipe, Outcome, examine_recipe
from support.every_family import FAMILIES, Family, build, family
from support.vision_models import save_vision_model

# The name of a model -> a family of tests/support/every_family.py, or with "images/" of tests/support/vision_models.py.
MODELS = {
    r"gemma-4-E": "gemma4",
    r"gemma-4-": "gemma4_moe",
    r"Nemotron-Nano|Nemotron-H|Nemotron-?3": "nemotron_h",
    r"nemotron|nano-?v3|super|ultra": "nemotron_h",
    r"Qwen3\.5-.*A\d": "qwen3_5_moe",
    r"Qwen3\.5": "qwen3_5",
    r"Qwen3-Next": "qwen3_next",
    r"gpt-oss": "gpt_oss",
    r"GLM-4\.7-Flash": "glm4_moe_lite",
    r"GLM-4": "glm4_moe",
    r"GLM-5": "glm_moe_dsa",
    r"DeepSeek-V3": "deepseek_v3",
    r"Kimi|Moonlight": "deepseek_v3",
}
WITH_IMAGES = {"gemma4": "gemma4", "gemma4_moe": "gemma4_moe", "qwen3_5_moe": "qwen3_5", "qwen3_5": "qwen3_5"}
MLA: Mapping[str, Any] = FAMILIES["deepseek_v3"].options
MORE: dict[str, Family] = {
    "glm4_moe_lite": family("Glm4MoeLiteConfig", experts=True, **{**MLA, "n_group": 1}),
    "glm_moe_dsa": family("GlmMoeDsaConfig", (), experts=True, **MLA, index_n_heads=2, index_head_dim=8, index_topk=16),
}
PARALLEL = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "pipeline_parallel_size")


def find_family(values: Mapping[str, Any]) -> str | None:
    policy = values.get("policy") or {}
    name = str(policy.get("model_name"))
    return next((each for pattern, each in MODELS.items() if re.search(pattern, name, re.IGNORECASE)), None)


def make_model(name: str, folder: Path) -> Path:
    """Save a tiny model and its tokenizer once."""
    if folder.exists():
        return folder
    if name.startswith("images/"):
        return save_vision_model(name.removeprefix("images/"), folder)
    FAMILIES.setdefault(name, MORE.get(name) or FAMILIES[name])
    tokenizer = tiny_tokenizer()
    build(name, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small(kind: str, values: Mapping[str, Any], model: Path, *, images: bool) -> list[str]:
    """The overrides that make a recipe one of seconds."""
    length = 512 if images else 64
    settings: dict[str, Any] = {
        "policy.model_name": str(model), "policy.tokenizer.name": str(model), "policy.backend": "torch", "policy.device": "cpu",
        "policy.max_total_sequence_length": length, "policy.train_global_batch_size": 8, "policy.train_micro_batch_size": 4,
        "policy.num_threads": 1, "policy.precision": "float32", "cluster.gpus_per_node": 1, "cluster.num_nodes": 1,
        "cluster.segment_size": None,
        "data.max_input_seq_length": length - 8, "checkpointing.enabled": False, "logger.log_dir": "logs", "logger.console": "none",
        f"{kind}.max_num_steps": 2, f"{kind}.val_period": 0, f"{kind}.val_at_start": False,
        **{f"policy.dtensor_cfg.{each}": 1 for each in PARALLEL}, "policy.dtensor_cfg.sequence_parallel": False,
        "policy.dtensor_cfg.cpu_offload": False,
        **{f"logger.{each}_enabled": False for each in ("wandb", "tensorboard", "mlflow", "swanlab")},
    }  # fmt: skip
    removed = [
        "data.validation",
        *(f"logger.{each}" for each in ("wandb", "tensorboard", "mlflow", "swanlab")),
    ]  # whose names name data
    if _has(values, f"{kind}.reward_shaping.overlong_buffer_length"):
        settings[f"{kind}.reward_shaping.overlong_buffer_length"] = 2
    if kind in DATA:
        settings["data.train"] = {"dataset_name": f"{DATA[kind]}.jsonl"}
    else:
        settings |= {
            f"{kind}.num_prompts_per_step": 2, f"{kind}.num_generations_per_prompt": 4, "policy.logprob_batch_size": 4,
            "policy.generation.backend": "torch", "policy.generation.max_new_tokens": 4,
            "policy.generation.torch_cfg.kv_cache_memory_gb": 0.05, "policy.generation.colocated.enabled": True,
        }  # fmt: skip
        if (
            _has(values, "policy.generation.vllm_cfg.precision")
            and values["policy"]["generation"]["vllm_cfg"]["precision"] == "fp8"
        ):
            settings |= {"policy.generation.quantization.emulate": True, "policy.fp8.emulate": True}
        environment = {"env_name": "drawn_images"} if images else {"env_name": "graded"}
        settings["data.train"] = environment
        settings["env"] = {"drawn_images": {}} if images else {"graded": {"type": GRADED["env.graded.type"]}}
    if kind == "ppo":
        settings |= {"value.model_name": str(model), **{f"value.dtensor_cfg.{each}": 1 for each in PARALLEL}}
    if kind == "distillation":
        settings |= {"teacher.model_name": str(model), **{f"teacher.dtensor_cfg.{each}": 1 for each in PARALLEL}}
    given = [f"~{key}" for key in (*removed, "data.train", "env") if _has(values, key)]
    return [*given, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]


def _has(values: Mapping[str, Any], key: str) -> bool:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def find_recipes(checkout: Path) -> Iterator[tuple[Path, str, str, Mapping[str, Any]]]:
    """Yield each recipe with its kind, family and values."""
    for path in sorted((checkout / "examples").rglob("*.yaml")):
        read = find_format(path).read(path)
        values = read_config_file(path).values
        if read.kind and (name := find_family(values)):
            yield path, read.kind, name, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="a regular expression of the names of recipes")
    parser.add_argument("--keep", type=Path, help="folder for models and runs")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp())
    print("| recipe | kind | family | as it is | two steps in small |\n|---|---|---|---|---|")
    passed = 0
    recipes = [each for each in find_recipes(options.checkout) if re.search(options.only, each[0].name)]
    for path, kind, name, values in recipes:
        examined = examine_recipe(path)
        if examined.outcome is Outcome.REFUSED:
            print(f"| {path.stem} | {kind} | {name} | {describe(examined)} | |", flush=True)
            continue
        images = path.name.startswith("vlm") and name in WITH_IMAGES
        name = f"images/{WITH_IMAGES[name]}" if images else name
        model = make_model(name, folder / "models" / name)
        where = folder / "runs" / path.stem
        where.mkdir(parents=True, exist_ok=True)
        write_data(where)
        arguments = small(kind, values, model, images=images)
        outcome = strop(kind, "--config", str(path.resolve()), *arguments, folder=where, timeout=300)
        passed += outcome.code == 0
        said = "passes" if outcome.code == 0 else f"{outcome.code}: {outcome.err.strip()[-400:]}".replace("\n", " ")
        print(f"| {path.stem} | {kind} | {name} | {describe(examined)} | {said} |", flush=True)
    print(f"\n{passed} of {len(recipes)} pass")


def describe(examined: ExaminedRecipe) -> str:
    if examined.outcome is not Outcome.REFUSED:
        return examined.outcome.name.lower()
    return "refused: " + "; ".join(dict.fromkeys(problem.key for problem in examined.problems))


if __name__ == "__main__":
    main()
