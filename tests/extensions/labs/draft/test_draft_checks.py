"""What a draft head does not go with is refused when the run starts, and one that nothing drafts with is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop import packages
from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.extensions.labs.draft.draft_config import DraftConfig
from strop.extensions.recorded.recorded_config import RmRunConfig, SftRunConfig
from support.overrides import RUN

HEAD = "policy.draft.enabled=true"
EAGLE = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.speculation.method=eagle3"]
MODEL = "policy.generation.vllm_cfg.speculation.model_name="
TORCH = "policy.generation.torch_cfg."
GPUS = ["cluster.gpus_per_node=2"]


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (EAGLE, "no head is trained"),
        ([*EAGLE, HEAD, f"{MODEL}other"], "drafts with the head that is trained"),
        ([*EAGLE, HEAD, "policy.generation.vllm_cfg.precision=fp8"], "its own are not rounded"),
        ([*EAGLE, HEAD, "policy.sequence_packing.enabled=false"], "the head reads packed rows"),
        ([*EAGLE, HEAD, "policy.compile=true"], "which compiled ones may not show"),
        ([*EAGLE, HEAD, "policy.dtensor_cfg.tensor_parallel_size=2", *GPUS], "alongside a whole policy"),
        ([*EAGLE, HEAD, *GPUS, "cluster.backend=ray"], "in a cluster of processes"),
        ([*EAGLE, HEAD, "policy.draft.aux_layer_indices=[3,1]"], "in the order of the model and each once"),
        ([*EAGLE, HEAD, "policy.dtensor_cfg.lora_cfg.enabled=true"], "sent with the policy's whole weights"),
        ([f"{TORCH}speculative_draft=3"], "so there is no head that proposes tokens"),
        ([HEAD, f"{TORCH}speculative_draft=3", f"{TORCH}speculative_lookup=3"], "one of them proposes tokens"),
    ],
)
def test_what_a_head_does_not_go_with_is_refused_with_the_way_out(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, *overrides], root=GrpoRunConfig)
    assert reason in str(caught.value) and len(caught.value.problems) == 1 and caught.value.problems[0].fix


def test_a_reward_model_has_no_head_and_a_recorded_run_may_have_one() -> None:
    recorded = ["policy.model_name=m", "data.train.dataset_name=squad", HEAD]
    with pytest.raises(ConfigError, match="a reward model does not predict tokens"):
        load_config(None, recorded, root=RmRunConfig)
    loaded = load_config(None, recorded, root=SftRunConfig)
    assert not any("head" in str(problem) for problem in loaded.warnings)
    assert DraftConfig.of(loaded.config.policy).enabled


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([*EAGLE, f"{MODEL}head"], False),
        ([*EAGLE, HEAD, "policy.draft.model_name=head", f"{MODEL}head"], False),
        (["policy.generation.backend=vllm", HEAD], True),
        ([HEAD], True),
        ([HEAD, f"{TORCH}speculative_draft=3"], False),
    ],
)
def test_a_head_that_no_engine_drafts_with_is_said(overrides: list[str], warned: bool) -> None:
    said = [str(problem) for problem in load_config(None, [*RUN, *overrides], root=GrpoRunConfig).warnings]
    assert len(said) == warned and all("no engine of this run drafts with it" in each for each in said)


def test_the_path_of_a_head_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(None, [*RUN, "policy.draft.model_name=~/head"], root=GrpoRunConfig, check=False).config
    assert DraftConfig.of(config.policy).model_name == f"{tmp_path}/head"
