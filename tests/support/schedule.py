"""What a worker of pytest-xdist takes next: a file at a time, the long ones first."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

# Files that take more than five seconds, the longest first: one that is begun late keeps the other workers waiting.
LONGEST = [
    "tests/unit/learner/megatron",
    "tests/unit/generation/vllm",
    "tests/unit/weight_sync/test_split_channel.py",
    "tests/loop/test_every_objective_trains.py",
    "tests/loop/test_recorded_runs.py",
    "tests/loop/test_watchdog_runs.py",
    "tests/loop/test_asynchronous.py",
    "tests/deploy/test_ray_sub.py",
    "tests/unit/distributed/test_ray.py",
    "tests/unit/learner/parallel/test_parity.py",
    "tests/unit/learner/test_one_gradient.py",
    "tests/unit/distributed/test_ray_gpus.py",
    "tests/loop/test_bad_input.py",
    "tests/loop/test_critic_and_teacher_runs.py",
    "tests/loop/test_kill_and_resume.py",
    "tests/unit/generation/test_sampler_and_learner_agree.py",
    "tests/loop/test_whole_runs.py",
    "tests/loop/test_cluster_runs.py",
    "tests/unit/learner/test_layer_compilation.py",
    "tests/unit/test_numerics_page.py",
    "tests/unit/models/test_every_family.py",
    "tests/unit/sandbox/test_sandbox_pool.py",
    "tests/unit/learner/parallel/test_sharded_checkpoint.py",
    "tests/loop/test_preemption.py",
    "tests/unit/test_simulated_gpu.py",
    "tests/loop/test_simulated_gpu_runs.py",
    "tests/unit/learner/parallel/pipeline/test_pipelined.py",
    "tests/security/test_hostile_programs.py",
    "tests/loop/test_safe_folders.py",
    "tests/unit/environments/test_answer_pairs.py",
    "tests/unit/learner/test_one_gradient_recorded.py",
    "tests/unit/environments/test_math.py",
    "tests/unit/environments/code/test_forged_verdicts.py",
    "tests/unit/learner/parallel/test_shares_on_ranks.py",
    "tests/test_architecture.py",
    "tests/unit/generation/test_keep_sampling_mask.py",
    "tests/golden/test_golden_curve.py",
    "tests/unit/learner/test_lora_learner.py",
    "tests/unit/generation/test_eagle_drafter.py",
    "tests/unit/data/test_builtin_sets.py",
    "tests/unit/environments/code/test_grade_code.py",
    "tests/unit/generation/test_lora_engine.py",
    "tests/unit/statistics/test_paired_comparison.py",
    "tests/unit/monitoring/hacking/test_hacking_monitor.py",
    "tests/unit/learner/test_training_details.py",
    "tests/unit/generation/test_frequencies.py",
    "tests/unit/rollouts/test_tokenizing_ahead.py",
]

# Files that use the same engine, or forks of the same server (``support.forks``), are one piece of work: a worker has its own of each.
TOGETHER = {
    "tests/loop/test_vllm_runs.py": "tests/unit/generation/vllm",
    "tests/unit/generation/vllm": "tests/unit/generation/vllm",
    "tests/loop/test_megatron_runs.py": "tests/unit/learner/megatron",
    "tests/unit/learner/megatron": "tests/unit/learner/megatron",
}

PLACES = {file: place for place, file in enumerate(LONGEST)}


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        together = (piece for start, piece in TOGETHER.items() if file == start or file.startswith(f"{start}/"))
        return next(together, file)

    def _assign_work_unit(self, node: Any) -> None:
        longest = min(self.workqueue, key=lambda scope: PLACES.get(scope.split("::", 1)[0], len(PLACES)))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
