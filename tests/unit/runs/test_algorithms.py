"""From the names, parts and flat keys of a configuration to an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.algorithm_factory import AlgorithmSetting, all_algorithms, find_algorithm, format_algorithm, make_algorithm
from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.critic import VAPO, Gae
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.corrections import Icepop, Importance, Tis
from strop.algorithms.policy_gradient.grpo import GRPO, Clip
from strop.algorithms.policy_gradient.grpo_variants import DAPO, SoftOverlong
from strop.algorithms.policy_gradient.sequence_objectives import GSPO, SequenceClip
from strop.algorithms.policy_gradient.token_objectives import ClippedWeight
from strop.base_config import option_set_by
from strop.config import ConfigError, TrainingRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.keys import iter_keys
from strop.runs.run_algorithm import (
    check_algorithm,
    collect_settings,
    infer_section,
    make_run_algorithm,
)
from strop.runs.summary import summarize
from strop.runs.train import run_training
from support.each import each
from support.sweep import one_in

ROLLOUTS = ["data.train.env_name=arithmetic", "env.arithmetic={}"]
RECORDED = ["data.train.dataset_name=squad"]
SAMPLING = ("grpo", "ppo", "distillation")


def config(section: str, *overrides: str) -> TrainingRunConfig:
    if section not in TRAINING_RUNS:
        pytest.skip(f"strop {section} is an extension's")
    base = ["policy.model_name=m", f"{section}.val_period=0", *(ROLLOUTS if section in SAMPLING else RECORDED)]
    if section == "distillation":
        base.append("teacher.model_name=t")
    return load_config(None, [*base, *overrides], root=TRAINING_RUNS[section]).config


def made(section: str, *overrides: str) -> Algorithm:
    return make_run_algorithm(config(section, *overrides))


# --- names and parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", all_algorithms())
def test_every_algorithm_is_made_by_its_name_and_described_in_one_line(name: str) -> None:
    algorithm = make_algorithm(name, {})
    assert algorithm == all_algorithms()[name]()
    line = format_algorithm(name, algorithm)
    assert line.startswith(name) and "\n" not in line and "object at" not in line


def test_a_part_is_named_by_a_word_or_by_a_mapping_with_its_options() -> None:
    LeaveOneOut = pytest.importorskip("strop.extensions.policy_gradients.baselines").LeaveOneOut
    TopEntropy = pytest.importorskip("strop.extensions.policy_gradients.entropy").TopEntropy
    found = make_algorithm(
        "grpo",
        {
            "advantage": "leave_one_out",
            "objective": {"name": "clip", "high": 0.28, "dual": 3},
            "corrections": ["importance", {"name": "icepop", "high": 3.0}],
            "selection": {"name": "top_entropy", "share": 0.5},
            "shaping": {"name": "soft_overlong", "buffer": 4, "max_length": 10},
            "kl": {"weight": 0.1, "estimator": "k1", "place": "reward"},
            "aggregation": "sequence_mean",
            "entropy_bonus": 1,
        },
    )
    assert found == GRPO(
        advantage=LeaveOneOut(),
        objective=Clip(high=0.28, dual=3.0),
        corrections=(Importance(), Icepop(high=3.0)),
        selection=TopEntropy(share=0.5),
        shaping=SoftOverlong(buffer=4, max_length=10),
        kl=Kl(weight=0.1, estimator="k1", place="reward"),
        aggregation="sequence_mean",
        entropy_bonus=1.0,
    )


def test_options_without_a_name_are_of_the_part_the_algorithm_has() -> None:
    """Its other options stay as the algorithm set them."""
    ReinforcePP = pytest.importorskip("strop.extensions.policy_gradients.baselines").ReinforcePP
    assert make_algorithm("dapo", {"objective": {"low": 0.1}}) == DAPO(objective=Clip(low=0.1, high=0.28))
    assert make_algorithm("vapo", {"advantage": {"gamma": 0.99}}) == VAPO(
        advantage=Gae(gamma=0.99, lambda_value=1.0, length_adaptive_alpha=0.05)
    )
    kl = make_algorithm("reinforce_pp", {"kl": {"weight": 0.2}})
    assert kl == ReinforcePP(kl=Kl(weight=0.2, estimator="k1", place="token_reward"))


def test_null_takes_an_optional_part_away() -> None:
    ReinforcePP = pytest.importorskip("strop.extensions.policy_gradients.baselines").ReinforcePP
    found = make_algorithm("reinforce_pp", {"kl": None})
    assert found == ReinforcePP(kl=None) and not found.requires


def test_a_part_may_hold_another_part() -> None:
    LeaveOneOut = pytest.importorskip("strop.extensions.policy_gradients.baselines").LeaveOneOut
    distillation = pytest.importorskip("strop.extensions.distillation.distillation")
    Distillation, ReverseKl = distillation.Distillation, distillation.ReverseKl
    found = make_algorithm("distillation", {"advantage": {"reward_weight": 0.5, "reward": "leave_one_out"}})
    assert found == Distillation(advantage=ReverseKl(reward_weight=0.5, reward=LeaveOneOut()))


@pytest.mark.extensions
def test_a_mapping_of_numbers_is_no_part() -> None:
    found = make_algorithm("gdpo", {"advantage": {"weights": {"correct": 1, "format": 0.5}}})
    assert dict(found.advantage.weights) == {"correct": 1.0, "format": 0.5}  # type: ignore[attr-defined]


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("gprpo", {}, "algorithm.name: 'gprpo' is neither one of Strop's algorithms nor module:Class; did you mean 'grpo'?"),
        ("GRPO", {}, "there are: alphapo"),
        ("strop.algorithms.policy_gradient.grpo:GRPPO", {}, "has no 'GRPPO'; did you mean 'GRPO'?"),
        ("strop.algorithms.policy_gradient.grpo:GroupRelative", {}, "is not a subclass of strop"),
        ("strop.algorithms.policy_gradient.base:PolicyGradient", {}, "needs advantage, objective"),
        ("strop.extensions.recorded.preference.base:PairwisePreference", {},
         "does not define pair_loss, which every algorithm must define"),
        ("grpo", {"clip_high": 0.3}, "algorithm.kwargs.clip_high: grpo has no such field"),
        ("grpo", {"objectiv": "clip"}, "did you mean 'objective'?"),
        ("grpo", {"objective": "clp"}, "algorithm.kwargs.objective: 'clp' is not a known objective; did you mean 'clip'?"),
        ("grpo", {"objective": "leave_one_out"}, "'leave_one_out' is not a known objective"),
        ("grpo", {"objective": 3}, "found 3; give the part's name, or {name: .., option: ..}"),
        ("grpo", {"objective": {"name": "clip", "hgh": 0.3}},
         "algorithm.kwargs.objective.hgh: Clip has no such option; did you mean 'high'?"),
        ("grpo", {"objective": {"name": "clip", "high": "wide"}}, "algorithm.kwargs.objective.high: found 'wide'"),
        ("grpo", {"objective": {"name": "clip", "low": 2.0}}, "algorithm.kwargs.objective: the ratio is clipped to"),
        ("grpo", {"corrections": {"name": "tis"}}, "give a list of parts, such as [{name: tis}]"),
        ("grpo", {"corrections": ["tis", "tiss"]},
         "algorithm.kwargs.corrections.1: 'tiss' is not a known correction; did you mean 'tis'?"),
        ("grpo", {"corrections": [{"cap": 2.0}]},
         "algorithm.kwargs.corrections.0: name the part; there are: divergence_rejection, geometric_rejection, icepop"),
        ("grpo", {"kl": {"name": "k3"}}, "Kl has no such option"),
        ("grpo", {"kl": {"weight": -1.0}}, "a negative one drives the policy away"),
        ("grpo", {"aggregation": "mean"}, "algorithm.kwargs.aggregation: found 'mean'"),
        ("grpo", {"overlong_filtering": "yes"}, "Input should be a valid boolean"),
        ("dpo", {"beta": 0.0}, "beta is 0"),
        ("kto", {"desirable_weight": "much"}, "algorithm.kwargs.desirable_weight: found 'much'"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_by_its_key(name: str, kwargs: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_algorithm(name, kwargs)
    assert said in str(caught.value)


OUTSIDE = """
from dataclasses import dataclass
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.algorithms.policy_gradient.parts import Advantage

@dataclass(frozen=True, kw_only=True)
class Bounded(Advantage):
    bound: float

    def rollout_advantages(self, group):
        return group.rewards.clamp(max=self.bound)

@dataclass(frozen=True, kw_only=True)
class Needs(GRPO):
    something: int

class Unmarked(GRPO):
    strength: float = 1.0
"""


@pytest.fixture
def outside(tmp_path: Path) -> str:
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    return str(path)


def test_parts_and_algorithms_from_outside_are_named_as_file_and_class(outside: str) -> None:
    found: Any = make_algorithm("grpo", {"advantage": {"name": f"{outside}:Bounded", "bound": 2}})
    assert type(found.advantage).__name__ == "Bounded" and found.advantage.bound == 2.0
    with pytest.raises(ValueError, match=r"algorithm\.kwargs\.advantage: Bounded needs bound"):
        make_algorithm("grpo", {"advantage": f"{outside}:Bounded"})
    with pytest.raises(
        ValueError, match=r"is not a known objective\. It is an advantage.*set algorithm\.advantage\.name=.*:Bounded$"
    ):
        make_algorithm("grpo", {"objective": f"{outside}:Bounded"})
    with pytest.raises(ValueError, match=r"is not a known objective\. It is an algorithm: set algorithm\.name=.*:Needs$"):
        make_algorithm("grpo", {"objective": f"{outside}:Needs"})
    assert make_algorithm(f"{outside}:Needs", {"something": 3}).something == 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Needs needs something"):
        make_algorithm(f"{outside}:Needs", {})
    with pytest.raises(ValueError, match="is not decorated with @dataclass"):
        find_algorithm(f"{outside}:Unmarked")


@pytest.mark.parametrize(
    ("kind", "method", "key"),
    [
        ("Objective", "__call__", "algorithm.objective.name"),
        ("Advantage", "rollout_advantages", "algorithm.advantage.name"),
        ("Selection", "choose", "algorithm.selection.name"),
        ("Shaping", "shape", "algorithm.shaping.name"),
        ("Correction", "weights", "algorithm.corrections"),
    ],
)
def test_a_part_named_as_algorithm_is_told_the_key_of_its_kind_which_takes_it(
    kind: str, method: str, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "part.py"
    lines = ["from dataclasses import dataclass", f"from strop.algorithms.policy_gradient.parts import {kind}"]
    lines += ["@dataclass(frozen=True, kw_only=True)", f"class Mine({kind}):", f"    def {method}(self, *given): return given"]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"It is an? {kind.lower()}.*: set {key}=") as caught:
        find_algorithm(f"{path}:Mine")
    _, _, setting = str(caught.value).rpartition(": set ")
    algorithm: Any = made("grpo", setting)
    found = getattr(algorithm, key.split(".")[1])
    assert type(found[0] if isinstance(found, tuple) else found).__name__ == "Mine"


@pytest.mark.extensions
def test_an_outline_names_every_option_in_force() -> None:
    kwargs = {"corrections": [{"name": "tis", "cap": 3.0}], "kl": {"weight": 0.1}, "on_policy_ratio": True}
    line = format_algorithm("grpo", make_algorithm("grpo", kwargs))
    assert "advantage group_relative(baseline=True, leave_one_out=False, normalize=True, deviation=population)" in line
    assert "objective clip(low=0.2, high=0.2)" in line
    assert "corrections tis(cap=3.0, floor=0.0, level=token)" in line
    assert "kl k3(weight=0.1, estimator=k3, place=loss" in line
    assert "aggregation token_mean" in line and "on_policy_ratio True" in line
    assert format_algorithm("simpo", make_algorithm("simpo", {})) == "simpo"
    assert format_algorithm("simpo", make_algorithm("simpo", {"gamma": 0.5})) == "simpo: gamma 0.5"


def described(section: str, *overrides: str) -> dict[str, str]:
    """What a run is said to be, by the first word of each line."""
    devices = ["policy.device=cpu", "policy.num_threads=1"]
    lines = summarize(config(section, *devices, *overrides)).splitlines()
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines}


def test_a_run_is_described_with_every_model_in_it() -> None:
    plain = described("grpo", "policy.precision=float32")
    assert plain["policy"] == "m on the CPU (1 thread), float32" and not {"critic", "teacher"} & plain.keys()
    lora = described("sft", "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4")
    assert lora["policy"].endswith("bfloat16 autocast over float32 weights, adapters of rank 4")
    assert lora["algorithm"] == "sft" and lora["data"] == "squad"
    assert described("rm", "policy.weights_dtype=bfloat16")["policy"].endswith("bfloat16, float32 masters")
    assert described("ppo", "value.model_name=c", "value.device=cpu")["critic"].startswith("c on the CPU")
    assert described("ppo", "value.head_only=true")["critic"] == "a head on the policy"
    assert described("distillation", "teacher.environments=[arithmetic]")["teacher"] == "t, for arithmetic"
    itself = described("distillation", "teacher.model_name=self", "teacher.self_weights=current", "teacher.demonstration=x")
    assert itself["teacher"] == "the policy (current), given a demonstration"


# --- flat keys ---------------------------------------------------------------------------------------------------------------------

# Each key by itself is in tests/conformance/test_flat_keys.py.
FLAT: list[tuple[str, str, Algorithm]] = [
    ("grpo", "grpo.reward_shaping.enabled=true grpo.reward_shaping.overlong_buffer_length=64",
     GRPO(shaping=SoftOverlong(buffer=64, penalty=1.0, max_length=512))),
    ("grpo", "loss_fn.reference_policy_kl_penalty=0", GRPO(kl=Kl(weight=0.0))),
    ("grpo", "loss_fn.reference_policy_kl_penalty=0.01 loss_fn.kl_input_clamp_value=null loss_fn.kl_output_clamp_value=5",
     GRPO(kl=Kl(weight=0.01, input_clamp=None, output_clamp=5.0))),
    (
        "grpo",
        "loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false loss_fn.ratio_clip_min=3e-4 "
        "loss_fn.ratio_clip_max=4e-4",
        GRPO(objective=SequenceClip(low=3e-4, high=4e-4), aggregation="sequence_mean"),
    ),
    ("grpo", "loss_fn.use_cispo=true loss_fn.ratio_clip_min=1 loss_fn.ratio_clip_max=4",
     GRPO(objective=ClippedWeight(low=1.0, high=4.0))),
    ("grpo", "algorithm.name=dapo grpo.use_dynamic_sampling=false loss_fn.ratio_clip_max=0.5",
     DAPO(drop_constant_groups=False, objective=Clip(high=0.5))),
    ("grpo", "algorithm.name=gspo loss_fn.ratio_clip_max=1e-3", GSPO(objective=SequenceClip(high=1e-3))),
    ("grpo", "algorithm.kwargs.objective.high=0.3 loss_fn.ratio_clip_max=0.4", GRPO(objective=Clip(high=0.4))),
    ("ppo", "algorithm.name=vapo ppo.adv_estimator.gae_lambda_policy=0.8",
     VAPO(advantage=Gae(lambda_policy=0.8, lambda_value=1.0, length_adaptive_alpha=0.05))),
    ("ppo", "algorithm.name=vapo ppo.policy_training_start_step=0", VAPO(policy_training_start_step=0)),
]  # fmt: skip


@pytest.mark.parametrize(("section", "overrides", "wanted"), FLAT, ids=lambda value: value if isinstance(value, str) else "")
def test_flat_keys_are_the_fields_of_the_algorithm_and_its_parts(section: str, overrides: str, wanted: Algorithm) -> None:
    assert made(section, *overrides.split()) == wanted


@pytest.mark.parametrize("section", TRAINING_RUNS)
def test_keys_that_are_not_set_leave_every_algorithm_as_its_paper_has_it(section: str) -> None:
    """But for keys that a section must have a value for: the divergence of topk_distillation."""
    for name, kind in all_algorithms().items():
        if infer_section(kind()) == section and name != "topk_distillation":
            found = config(section, f"algorithm.name={name}")
            assert make_algorithm(name, {}, collect_settings(found)) == kind()


@pytest.mark.parametrize("key", ["reference_policy_kl_type=k1", "use_kl_in_reward=true", "use_on_policy_kl_approximation=true"])
def test_how_a_kl_term_is_taken_does_not_switch_one_on(key: str) -> None:
    """Null is the algorithm's own weight, and GRPO has none: no reference policy is loaded."""
    found: Any = made("grpo", f"loss_fn.{key}")
    assert found.kl.weight == 0 and not found.requires


@pytest.mark.extensions
def test_clamps_of_the_kl_term_reach_an_algorithm_that_has_one_of_its_own() -> None:
    found: Any = made("grpo", "algorithm.name=reinforce_pp", "loss_fn.kl_output_clamp_value=3")
    assert found.kl == Kl(weight=0.01, estimator="k1", place="token_reward", output_clamp=3.0)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("section", "overrides", "said"),
    [
        ("grpo", "algorithm.name=rloo grpo.normalize_rewards=true",
         "grpo.normalize_rewards: found True, but the advantage of rloo is leave_one_out, which has no option normalize"),
        ("grpo", "algorithm.name=reinforce loss_fn.ratio_clip_min=0.2",
         "the objective of reinforce is reinforce, which has no option low"),
        ("grpo", "loss_fn.use_cispo=true loss_fn.ratio_clip_c=3",
         "loss_fn.ratio_clip_c: found 3.0, but the objective of grpo is cispo"),
        ("grpo", "loss_fn.use_cispo=true loss_fn.disable_ppo_ratio=true",
         "use_cispo and disable_ppo_ratio each choose the objective"),
        ("grpo", "loss_fn.truncated_importance_sampling_type=tis", "use_importance_sampling_correction is false"),
        ("grpo", "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=tis",
         "needs an upper bound"),
        ("grpo", "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio=2",
         "loss_fn.truncated_importance_sampling_ratio: found 2.0, but truncated_importance_sampling_type is null"),
        ("grpo", "loss_fn.truncated_importance_sampling_ratio=2",
         "set the type to tis, icepop or seq-mask-tis and use_importance_sampling_correction to true"),
        ("ppo", "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio_min=0.5",
         "loss_fn.truncated_importance_sampling_ratio_min: found 0.5"),
        ("grpo", "grpo.adv_estimator.name=group_relativ", "did you mean 'group_relative'?"),
        ("grpo", "grpo.reward_shaping.enabled=true grpo.reward_shaping.overlong_buffer_length=600",
         "every response would be punished"),
        ("grpo",
         "loss_fn.reference_policy_kl_penalty=0.1 loss_fn.use_kl_in_reward=true loss_fn.use_on_policy_kl_approximation=true",
         "loss_fn.use_on_policy_kl_approximation: unbiased applies to a KL term in the loss"),
        ("ppo", "algorithm.kwargs.value_clip=-1", "the values could not change"),
        ("distillation", "distillation.overlong_filtering=true",
         "distillation.overlong_filtering: found True, but topk_distillation has no overlong_filtering"),
        ("distillation", "algorithm.name=distillation distillation.use_dynamic_sampling=true",
         "rewards that have no weight in the loss"),
        ("dpo", "algorithm.name=simpo dpo.reference_policy_kl_penalty=0.1", None),
        ("dpo", "algorithm.name=orpo dpo.reference_policy_kl_penalty=0.1",
         "dpo.reference_policy_kl_penalty: found 0.1, but orpo has no beta. Remove the key, or choose another algorithm.name"),
        ("dpo", "algorithm.name=kto dpo.sft_loss_weight=0.1", "but kto has no sft_weight"),
        ("dpo", "dpo.preference_loss_weight=0", "at least one must be above 0"),
    ],
)  # fmt: skip
def test_flat_keys_that_an_algorithm_has_no_use_for_are_refused(section: str, overrides: str, said: str | None) -> None:
    if said is None:
        made(section, *overrides.split())
        return
    with pytest.raises(ValueError) as caught:
        made(section, *overrides.split())
    assert said in str(caught.value)


def test_an_algorithm_from_outside_is_warned_about_flat_keys_it_has_no_fields_for() -> None:
    SFT = pytest.importorskip("strop.extensions.recorded.supervised").SFT
    name = "strop.extensions.recorded.supervised:SFT"
    settings = [
        AlgorithmSetting("loss_fn.beta", "beta", 0.1),
        AlgorithmSetting("loss_fn.aggregation", "aggregation", "sequence_mean"),
    ]
    with pytest.warns(UserWarning, match=r"SFT does not use loss_fn\.beta; this key has no effect"):
        assert make_algorithm(name, {}, settings) == SFT(aggregation="sequence_mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_algorithm(name, {}, settings[1:])


@pytest.mark.extensions
def test_an_algorithm_from_outside_is_not_warned_about_a_key_that_is_off() -> None:
    """As the penalty of the README's own REINFORCE, which no one asked for."""
    off = AlgorithmSetting("loss_fn.reference_policy_kl_penalty", "kl.weight", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_algorithm("strop.extensions.recorded.supervised:SFT", {}, [off])
    with pytest.warns(UserWarning, match="loss_fn.reference_policy_kl_penalty; this key has no effect"):
        make_algorithm("strop.extensions.recorded.supervised:SFT", {}, [replace(off, value=0.1)])


# --- what does not fit a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("algorithm.kwargs.on_policy_ratio=true grpo.update_epochs=2", "set it to false, or run one optimizer step per batch"),
        ("algorithm.kwargs.on_policy_ratio=true policy.train_global_batch_size=256", "there are 2 optimizer steps per batch"),
        ("algorithm.name=rloo grpo.num_generations_per_prompt=1", "raise num_generations_per_prompt"),
        ("algorithm.name=pass_at_k algorithm.kwargs.advantage.k=32", "a group has 16"),
        ("algorithm.name=gdpo algorithm.kwargs.advantage.weights.correct=1 algorithm.kwargs.advantage.weights.charm=1",
         "GDPO has weights for rewards that no environment returns: charm; available are correct"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_together_is_refused_when_a_run_starts(overrides: str, said: str) -> None:
    """By the plan that the configuration makes; what each algorithm refuses is in tests/unit/algorithms/test_refusals.py."""
    with pytest.raises(ValueError) as caught:
        made("grpo", *overrides.split())
    assert said in str(caught.value) and str(caught.value).startswith("the algorithm does not fit the run:\n  ")


def test_everything_that_speaks_against_an_algorithm_is_said_at_once() -> None:
    algorithm = GRPO(corrections=(Tis(), Tis()), aggregation="constant_length")
    with pytest.raises(ValueError) as caught:
        check_algorithm(algorithm, Plan(group_size=1))
    assert len(str(caught.value).splitlines()) == 4


def test_a_run_is_refused_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [f"logger.log_dir={tmp_path / 'logs'}", f"checkpointing.checkpoint_dir={tmp_path / 'saved'}"]
    assert run_training(config("grpo", "grpo.num_generations_per_prompt=1", "cluster.backend=ray", *logs)) == 1
    assert "always 0, so there is nothing to learn" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", one_in(8, all_algorithms()))
def test_an_algorithm_of_another_kind_of_run_is_refused_with_its_own(name: str) -> None:
    own = infer_section(all_algorithms()[name]())
    for section in TRAINING_RUNS:
        if section == own:
            continue
        found = config(section)
        other = replace(found, algorithm=replace(found.algorithm, name=name, kwargs={}))
        with pytest.raises(ValueError, match=rf"^algorithm\.name: {name} .*run strop {own}$|{name} has no|of {name} is"):
            make_run_algorithm(other)


NEEDED = ["policy.model_name=m", "value.model_name=m", "teacher.model_name=t"]
SYNONYMS = [
    (section, key.dotted, option)
    for section, root in TRAINING_RUNS.items()
    for key in iter_keys(root)
    if (option := option_set_by(key.field))
]


def make(section: str, overrides: list[str], path: Path | None = None) -> Algorithm:
    root: Any = TRAINING_RUNS[section]
    needed = [key for key in NEEDED if key.split(".")[0] in {k.path[0] for k in iter_keys(root)}]
    config = load_config(path, [*needed, *overrides], root=root, check=False).config
    return make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))


def test_there_are_synonyms_to_check() -> None:
    assert len(SYNONYMS) > 30


OTHER_VALUES = {  # options that 0.25 does not suit
    "advantage.deviation": "unbiased",
    "advantage.leave_one_out": "true",
    "advantage.normalize": "false",
    "advantage.baseline": "false",
    "advantage.whiten": "false",
    "average_log_probs": "true",
    "constant_length": "7",
    "drop_constant_groups": "true",
    "kl.estimator": "k2",
    "kl.unbiased": "true",
    "objective.dual": "3.5",
    "on_policy_ratio": "true",
    "overlong_filtering": "true",
    "policy_training_start_step": "7",
    "seq_logprob_error_threshold": "2.5",
    "use_margin": "true",
}


@each("section, key, option", SYNONYMS, ids=lambda part: str(part))
def test_a_key_and_its_option_make_the_same_algorithm(section: str, key: str, option: str) -> None:
    value = OTHER_VALUES.get(option, "0.25")
    base = ["algorithm.name=distillation", "algorithm.advantage.reward_weight=0.5"] if section == "distillation" else []
    alone = ["algorithm.advantage.lambda_value=0.95"] if option == "advantage.lambda_policy" else []  # the critic keeps its own
    by_key, by_option = make(section, [*base, f"{key}={value}"]), make(section, [*base, *alone, f"algorithm.{option}={value}"])
    assert by_key == by_option != make(section, base)


def test_the_command_line_holds_over_the_file_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss_fn: {ratio_clip_max: 0.3}\nalgorithm: {objective: {low: 0.1}}\n")
    found: Any = make("grpo", ["algorithm.objective.high=0.28", "loss_fn.ratio_clip_min=0.15"], path)
    assert (found.objective.low, found.objective.high) == (0.15, 0.28)


def test_two_values_for_one_option_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ratio_clip_max: found 0\.2, and algorithm\.objective\.high, another name .* is 0\.28"
    ):
        make("grpo", ["loss_fn.ratio_clip_max=0.2", "algorithm.objective.high=0.28"])
    assert make("grpo", ["loss_fn.ratio_clip_max=0.3", "algorithm.objective.high=0.3"]) == make(
        "grpo", ["algorithm.objective.high=0.3"]
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.objectve.high=0.3"], r"algorithm\.objectve: grpo has no such field; did you mean 'objective'\?"),
        (["algorithm.objective.hgh=0.3"], r"algorithm\.objective\.hgh: Clip has no such option; did you mean 'high'\?"),
        (["algorithm.objective.high=wide"], r"algorithm\.objective\.high: found 'wide'"),
        (
            ["loss_fn.use_cispo=true", "algorithm.objective=clip"],
            r"use_cispo chooses the objective, and algorithm\.objective names one",
        ),
    ],
)
def test_mistakes_are_named_by_the_key_that_was_written(overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("grpo", overrides)


def test_options_of_a_part_that_another_key_chose_apply_to_it() -> None:
    found: Any = make("grpo", ["loss_fn.use_cispo=true", "algorithm.objective.high=3.0"])
    assert type(found.objective).__name__ == "ClippedWeight" and found.objective.high == 3.0
