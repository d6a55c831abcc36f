"""Section ``async_rl``: each sampler of NeMo-RL's single controller as an order of asynchronous training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.extensions.recipes.difference import Effect

RECIPE = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, async_grpo: null, val_period: 0}
env: {math: {}}
data: {train: {dataset_name: OpenMathInstruct-2, env_name: math}}
cluster: {gpus_per_node: 2, backend: ray}
policy: {model_name: m, generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}}
async_rl: {%s, min_groups_for_streaming_train: 4, max_inflight_prompts: 8, max_buffered_rollouts: 24, stall_watchdog: {interval_s: 30.0}}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_sampler(section: str) -> LoadedConfig[GrpoRunConfig]:
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE % section)
        return load_config(path, root=GrpoRunConfig)

    return load_sampler


def changed(loaded: LoadedConfig[Any]) -> dict[str, str]:
    return {difference.key: difference.text for difference in loaded.differences if difference.effect is Effect.CHANGED}


def test_batches_in_order_are_trained_on_in_order(load: Any) -> None:
    loaded = load("sampler: {name: in_order, max_lookahead_versions: 2}, recompute_kv_cache_after_weight_updates: true")
    section = loaded.config.grpo.async_grpo
    assert section.enabled and section.order == "fifo" and section.max_trajectory_age_steps == 2
    assert section.in_flight_weight_updates and section.recompute_kv_cache_after_weight_updates and not changed(loaded)


def test_no_lookahead_is_synchronous_training(load: Any) -> None:
    loaded = load("sampler: {name: in_order, max_lookahead_versions: 0}")
    assert not loaded.config.grpo.async_grpo.enabled and not changed(loaded)


def test_a_section_without_a_sampler_has_nemo_rl_s_default(load: Any) -> None:
    section = load("diagnostics: false").config.grpo.async_grpo
    assert section.enabled and section.order == "fifo" and section.max_trajectory_age_steps == 1


def test_what_gets_too_old_is_dropped_with_as_many_groups_buffered(load: Any) -> None:
    loaded = load("sampler: {name: windowed, max_staleness_versions: 1}")
    section = loaded.config.grpo.async_grpo
    assert section.order == "drop_too_old" and section.slots == 24 + 8 and not changed(loaded)


@pytest.mark.parametrize(("sampler", "order"), [("ready_first", "windowed"), ("weight_fifo", "fifo")])
def test_an_order_that_differs_a_little_is_said(load: Any, sampler: str, order: str) -> None:
    loaded = load(f"sampler: {{name: {sampler}}}")
    assert loaded.config.grpo.async_grpo.order == order and "async_rl.sampler.name" in changed(loaded)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("{name: custom, target: 'mine:Sampler'}", "no counterpart"),
        ("{name: windowed, sample_freshest_first: true}", "no counterpart"),
        ("{name: in_order, max_lookahead_versions: -1}", "at least 0"),
    ],
)
def test_a_sampler_without_a_counterpart_is_refused(load: Any, sampler: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(f"sampler: {sampler}")
    assert len(caught.value.problems) == 1


def test_two_sections_of_asynchronous_training_are_refused_as_by_nemo_rl(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text((RECIPE % "sampler: {name: in_order}").replace("async_grpo: null", "async_grpo: {enabled: true}"))
    with pytest.raises(ConfigError, match="reads async_rl alone"):
        load_config(path, root=GrpoRunConfig)
