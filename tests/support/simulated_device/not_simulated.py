"""Which tests of ``tests/gpu`` cannot run on the simulated GPU, and why."""

from __future__ import annotations

CUDA_IPC = "CUDA IPC maps memory of another process by CUDA"
NCCL = "NCCL connects GPUs of CUDA"
VLLM = "vLLM's kernels are CUDA's"
FLEX = "flex attention is compiled by Triton for CUDA"

# By file, or by file and the beginning of a test with its parameters.
REASONS = {
    "test_gpu_deterministic.py": "new interpreters compute on cuda by its name",
    "test_gpu_devices.py": "it asks torch.cuda, and new interpreters, for the GPUs of the machine",
    "test_gpu_megatron.py": "Megatron Core computes with what it finds as torch.cuda",
    "test_gpu_pipeline.py": NCCL,
    "test_gpu_vllm.py": VLLM,
    "test_gpu_attention.py::test_a_kernel_in_bfloat16_equals_a_dense_mask_in_float64[flex": FLEX,
    "test_gpu_attention.py::test_a_group_of_long_completions_stores_no_scores": "what stands for the fused kernel keeps its scores",
    "test_gpu_engine.py::test_the_cache_takes_the_configured_memory_and_generating_no_more_than_a_little[True": "a simulated graph keeps "
    "all memory that its operators took",
    "test_gpu_learner.py::test_a_run_on_another_gpu_than_the_first_computes_there": "there is one simulated GPU",
    "test_gpu_learner.py::test_tritons_kernels_give_the_numbers_of_pytorchs_operators": "Triton compiles for CUDA",
    "test_gpu_learner.py::test_attention_to_a_shared_prefix_stores_no_scores": "torch's attention with a mask on a CPU keeps its scores",
    "test_gpu_offload.py::test_a_learner_is_away_while_a_colocated_engine_samples_and_back_to_train": VLLM,
    "test_gpu_router_replay.py::test_vllm_says_the_experts_of_prompts_and_completions": VLLM,
    "test_gpu_weights.py::test_through_gpu_memory": CUDA_IPC,  # and to another GPU
    "test_gpu_weights.py::test_by_nccl_broadcast": NCCL,
}


def find_reason(file: str, test: str) -> str | None:
    """Return why a test cannot run on the simulated GPU; None if it can."""
    return REASONS.get(file) or next((reason for key, reason in REASONS.items() if f"{file}::{test}".startswith(key)), None)
