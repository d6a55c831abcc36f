"""Problems that programs solve, for the environments ``code`` and ``humaneval``, and answers with programs."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Grader, Splits

_TEST = Splits(None, evaluation="test")
_MBPP = Grader("code", {"wording": "benchmark", "shown_tests": 3, "challenge_tests": False})
# Six seconds a test, as its own runner has them, which ends at the first failure.
_LIVECODEBENCH = Grader(
    "code", {"wording": "benchmark", "timeout_s": 6.0, "total_timeout_s": 120.0, "memory_mb": 4096, "stop_early": True}
)
_RELEASES = {
    f"release_v{last}": tuple(f"test{number if number > 1 else ''}.jsonl" for number in range(1, last + 1))
    for last in range(1, 7)
}


def _mbpp(subset: str) -> BuiltinDataset:
    splits = Splits("train", validation="validation", evaluation="test")
    question = "text" if subset == "full" else "prompt"
    return BuiltinDataset("google-research-datasets/mbpp", splits, question, "", subset=subset, grader=_MBPP)


def _humaneval(hub: str) -> BuiltinDataset:
    return BuiltinDataset(hub, _TEST, "prompt", "", grader=Grader("humaneval"))


def _livecodebench(release: str) -> BuiltinDataset:
    """Return the problems of a release, which has those of the releases before it."""
    return BuiltinDataset(
        "livecodebench/code_generation_lite",
        _TEST,
        input_key="question_content",
        output_key="",
        subset=release,
        files=_RELEASES,
        grader=_LIVECODEBENCH,
    )


CODE_SETS: Mapping[str, BuiltinDataset] = {
    "humaneval": _humaneval("openai/openai_humaneval"),
    "humaneval_plus": _humaneval("evalplus/humanevalplus"),
    "mbpp": _mbpp("full"),
    "mbpp_sanitized": _mbpp("sanitized"),
    "mbpp_plus": BuiltinDataset("evalplus/mbppplus", _TEST, "prompt", "", grader=_MBPP),
    "livecodebench": _livecodebench("release_v6"),
    **{f"livecodebench_{release}": _livecodebench(release) for release in _RELEASES},
    "DeepCoder": BuiltinDataset(
        "agentica-org/DeepCoder-Preview-Dataset", output_key="", subset="primeintellect,taco,lcbv5", grader=Grader("code")
    ),
    "verifiable-coding-problems-python": BuiltinDataset(
        "open-r1/verifiable-coding-problems-python",
        input_key="problem_statement",
        output_key="",
        grader=Grader("code"),
    ),
    "OpenCodeReasoning": BuiltinDataset(
        "nvidia/OpenCodeReasoning", Splits("split_0"), input_key="input", output_key="output", subset="split_0"
    ),
}
