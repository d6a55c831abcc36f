"""``--dry-run``: fast, without torch, and telling of everything that a configuration names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop import cli, packages
from strop.config import dump_config, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from support.sweep import one_in

ROOT = Path(__file__).parents[3]
ARITHMETIC = ["policy.model_name=m", "policy.device=cpu", "env.arithmetic={}", "data.train.env_name=arithmetic"]
RUN = [*ARITHMETIC, "grpo.val_period=0", "checkpointing.metric_name=null"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a dry run prints: on stdout if it succeeds, else on stderr."""
    assert cli.main([*words, "--dry-run"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err if code else captured.out


DRY_RUNS: list[tuple[list[str], int]] = [
    (["grpo", "--config", "examples/configs/grpo_math_1B.yaml"], 0),
    (["grpo", "--config", "examples/configs/grpo_math_1B.yaml", "grpo.num_generations_per_prompt=1"], 2),
    (["sft", "--config", "examples/configs/sft.yaml", "--assume-gpus", "8", "--assume-nodes", "2"], 0),
]


@pytest.mark.extensions
def test_a_dry_run_takes_less_than_three_seconds_and_no_torch() -> None:
    """Processor time, so that a busy machine does not matter. Without a driver of a GPU, whose presence only torch can tell.

    In one process, whose imports count each time: the first is repeated, which tells what it took to import.
    """
    program = (
        "import sys, time\nfrom strop.cli import main\nimported = time.process_time()\n"
        f"for words in {[DRY_RUNS[0][0], *(words for words, _ in DRY_RUNS)]}:\n"
        "    began = time.process_time()\n"
        "    code = main([*words, '--dry-run'])\n"
        "    print('measured', code, 'torch' in sys.modules, imported, time.process_time() - began)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, *measured = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("measured "))
    imported = float(first[2]) + max(float(first[3]) - float(measured[0][3]), 0.0)
    for (words, code), (ended, with_torch, _, seconds) in zip(DRY_RUNS, measured, strict=True):
        assert int(ended) == code and imported + float(seconds) < 3.0, words
        assert with_torch == "False" or Path("/dev/nvidiactl").exists(), words


def test_the_summary_has_about_ten_lines_and_the_algorithm_is_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(
        capsys, "grpo", *RUN, "loss_fn.ratio_clip_max=0.28", "loss_fn.reference_policy_kl_penalty=0.02", "grpo.max_num_steps=7"
    )
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert lines["algorithm"] == "grpo, with objective.high=0.28, kl.weight=0.02"
    assert lines["training"] == "1 epoch, at most 7 steps; validation off"
    assert lines["tasks"] == "arithmetic" and "every 10 steps" in lines["folders"] and len(lines) <= 10


def test_validation_without_data_is_said_to_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(capsys, "grpo", *ARITHMETIC, "grpo.val_period=10", "checkpointing.metric_name=null")
    assert "validation off" in said and "validation every" not in said


def test_verbose_prints_every_key_and_every_option_of_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["grpo", *RUN, "--dry-run", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run_name: null\nalgorithm:\n  name: grpo") and said.count("\n") > 250
    assert "advantage group_relative(baseline=True" in said


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry run", "run"])
def test_what_an_algorithm_refuses_ends_with_2_in_a_dry_run_and_in_a_run(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["grpo", *RUN, "grpo.num_generations_per_prompt=1", *flags]) == 2
    assert "there is nothing to learn" in capsys.readouterr().err


# --- what is looked at -----------------------------------------------------------------------------------------------------


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


QUESTION = {"question": "1 + 1?", "answer": "2"}
MATH = ["policy.model_name=m", "policy.device=cpu", "env.math={}", "grpo.val_period=0", "checkpointing.metric_name=null"]


@pytest.mark.extensions
def test_the_columns_of_local_data_are_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"data.train.dataset_name={write_rows(folder / 'tasks.jsonl', QUESTION, QUESTION, QUESTION)}"
    said = dry_run(capsys, "grpo", *MATH, name, "data.train.input_key=questoin", code=2)
    assert "tasks.jsonl:1 has no key 'questoin'" in said and "did you mean 'question'?" in said and "data.train" in said
    assert "tasks.jsonl, 3 rows (math)" in dry_run(capsys, "grpo", *MATH, name, "data.train.input_key=question")


@pytest.mark.extensions
def test_a_dataset_of_the_hub_that_is_not_cached_is_named_as_not_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    said = dry_run(capsys, "grpo", *MATH, "data.train.dataset_name=gsm8k")
    assert "data.train: gsm8k is on the hub and not in the local cache: its columns were not examined" in said


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("section", "key"), [("grpo", "policy.model_name"), ("ppo", "value.model_name"), ("distillation", "teacher.model_name")]
)
def test_a_folder_without_a_model_is_named_by_its_own_key(
    section: str, key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ARITHMETIC, f"{section}.val_period=0", "checkpointing.metric_name=null", f"{key}=results/rm/step_9/policy/weights"]
    words += ["teacher.model_name=results/rm/step_9/policy/weights"] if section == "distillation" else []
    assert f"{key}: there is no folder results/rm/step_9/policy/weights" in dry_run(capsys, section, *words, code=2)


def test_checkpoints_in_the_folder_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = folder / "results" / "grpo" / "step_20"
    checkpoint.mkdir(parents=True)
    config = load_config(None, RUN, root=TRAINING_RUNS["grpo"]).config
    (checkpoint / "config.yaml").write_text(dump_config(config))
    (checkpoint / "files.json").write_text("{}")
    assert "the run continues from results/grpo/step_20" in dry_run(capsys, "grpo", *RUN)
    assert "with grpo.max_num_steps" in dry_run(capsys, "grpo", *RUN, "grpo.max_num_steps=25")
    assert "grpo.seed: found 7, and the run in there has 42" in dry_run(capsys, "grpo", *RUN, "grpo.seed=7", code=2)
    assert "finished at step 20" in dry_run(capsys, "grpo", *RUN, "grpo.max_num_steps=10", code=2)
    assert "they move to previous_N" in dry_run(capsys, "grpo", *RUN, "checkpointing.resume=never")


@pytest.mark.parametrize("section", TRAINING_RUNS)
@pytest.mark.parametrize("value", one_in(3, [".nan", ".inf", "-.inf"]))
def test_numbers_that_are_not_finite_are_refused_everywhere(section: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = ["teacher.model_name=t"] if section == "distillation" else []
    keys = ["policy.max_grad_norm", "policy.optimizer.kwargs.eps", "algorithm.kwargs.x", "logger.no_such"][:3]
    for key in keys:
        said = dry_run(
            capsys, section, "policy.model_name=m", *teacher, "data.train.dataset_name=squad", f"{key}={value}", code=2
        )
        assert f"{key}: found " in said and "with which nothing can be computed" in said


def test_a_dry_run_leaves_nothing_in_the_folders_that_it_tries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "here").mkdir()
    dry_run(capsys, "grpo", *RUN, "logger.log_dir=here", "checkpointing.checkpoint_dir=new/folder")
    assert [path.name for path in folder.iterdir()] == ["here"] and not list((folder / "here").iterdir())


def test_a_link_to_nothing_is_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs").symlink_to(folder / "gone")
    assert "command line: logger.log_dir: " in dry_run(capsys, "grpo", *RUN, "logger.log_dir=logs/run", code=2)


def test_heads_are_counted_only_where_the_layout_cuts_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    values = {"model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    (folder / "model" / "config.json").write_text(json.dumps(values))
    words = [*RUN, "policy.model_name=model", "cluster.gpus_per_node=4"]
    dry_run(capsys, "grpo", *words, "policy.dtensor_cfg.tensor_parallel_size=2")
    dry_run(capsys, "grpo", *words, "policy.dtensor_cfg.tensor_parallel_size=4")  # its plan gathers the projections' outputs
    dry_run(capsys, "grpo", *words, "policy.dtensor_cfg.context_parallel_size=4")  # keys and values go around a ring


def test_a_folder_of_shards_is_refused_with_what_converts_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "w").mkdir()
    (folder / "w" / ".metadata").touch()
    assert "strop export w FOLDER" in dry_run(capsys, "grpo", *RUN, "policy.model_name=w", code=2)


def test_router_replay_of_a_model_without_experts_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    words = [*RUN, "policy.model_name=model", "policy.router_replay.enabled=true"]
    assert "policy.router_replay.enabled: found true, but model has no experts" in dry_run(capsys, "grpo", *words, code=2)


def test_a_chat_template_with_the_tags_of_transformers_is_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags = "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if m.stop %}{% break %}{% endif %}{% endfor %}"
    (folder / "chat.jinja").write_text(tags)
    dry_run(capsys, "grpo", *RUN, "policy.tokenizer.chat_template=chat.jinja")


FP8 = "policy.fp8.enabled=true"


@pytest.mark.extensions
@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize("section", ["grpo", "sft"])
def test_fp8_on_a_machine_without_gpus_is_refused(
    section: str, flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_here", lambda package: True)
    rows = f"data.train.dataset_name={write_rows(folder / 'rows.jsonl', {'prompt': '1', 'completion': '2'})}"
    sft = ["policy.model_name=m", rows, "sft.val_period=0", "checkpointing.metric_name=null"]
    words = [*(RUN if section == "grpo" else sft), "policy.device=auto", FP8]
    assert cli.main([section, *words, *flags]) != 0
    said = capsys.readouterr().err
    assert "policy.fp8.enabled: found true, but a CPU has no products in FP8" in said and "policy.fp8.emulate=true" in said
    if flags:
        dry_run(capsys, section, *words, "policy.fp8.emulate=true")
        dry_run(capsys, section, *words, "--assume-gpus", "1")


def test_the_precision_of_weights_is_that_of_the_learner_and_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["grpo", *RUN, "policy.device=auto", "policy.precision=bfloat16", "--assume-gpus", "8"]
    assert ", bfloat16 autocast over float32 weights\n" in dry_run(capsys, *run)
    assert ", bfloat16, float32 masters\n" in dry_run(capsys, *run, "policy.weights_dtype=bfloat16")


# --- GPUs that are not here ------------------------------------------------------------------------------------------------


def test_what_a_gpu_cluster_would_do_is_shown_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    vllm = ["policy.device=auto", "policy.generation.backend=vllm", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    said = dry_run(capsys, "grpo", *RUN, *vllm, "--assume-gpus", "8", "--assume-nodes", "2")
    assert "learner     16 ranks on 2 nodes" in said and "engines     8 engines of 2 devices on nodes 0 to 1, colocated" in said
    assert "node 1      trains on GPU 0-7; generates on engine 4: 0-1" in said
    assert "batch       512 rollouts an optimizer step over 16 data ranks: 32 each" in said
    assert "weights     broadcast" in said and "vllm        bfloat16" in said


def test_on_an_assumed_gpu_auto_is_vllm_and_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    said = dry_run(capsys, "grpo", *RUN, "policy.device=auto", "--assume-gpus", "1")
    assert "a vLLM engine in a separate process, bfloat16 (backend auto: there are GPUs and vLLM)" in said
    assert "weights     cuda_ipc" in said and "60% of each GPU's memory" in said
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "vllm")
    said = dry_run(capsys, "grpo", *RUN, "policy.device=auto", "--assume-gpus", "1")
    assert (
        "embedded torch engine in this process, a tenth of the GPU's memory as cache (backend auto: vLLM is not installed)"
        in said
    )


@pytest.mark.parametrize(
    "words", [["--assume-gpus", "8"], ["--assume-nodes", "2", "--dry-run"], ["--assume-gpus", "0", "--dry-run"]]
)
def test_assumptions_without_meaning_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["grpo", *RUN, *words])
    assert "--assume" in capsys.readouterr().err
