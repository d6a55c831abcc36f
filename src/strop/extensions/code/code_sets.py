"""Programming problems for the environments ``code`` and ``humaneval``, and answers with programs."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin_dataset import BuiltinDataset, Grader, Splits

_TEST = Splits(None, evaluation="test")
_MBPP = Grader("code", {"wording": "benchmark", "shown_tests": 3, "challenge_tests": False})
# Six seconds per test, as in its own runner, which stops at the first failure.
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
    return BuiltinDataset(
        "google-research-datasets/mbpp",
        splits,
        question,
        "",
        subset=subset,
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        grader=_MBPP,
    )


def _humaneval(hub: str, revision: str | None = None) -> BuiltinDataset:
    return BuiltinDataset(hub, _TEST, "prompt", "", revision=revision, grader=Grader("humaneval"))


def _livecodebench(release: str) -> BuiltinDataset:
    """Return the problems of a release, which includes those of earlier releases."""
    return BuiltinDataset(
        "livecodebench/code_generation_lite",
        _TEST,
        input_key="question_content",
        output_key="",
        subset=release,
        revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        files=_RELEASES,
        grader=_LIVECODEBENCH,
    )


_SETS = {
    "humaneval": _humaneval("openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"),
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
        revision="b761a24a95fa03289a231d2d31c183636ffb9833",
        grader=Grader("code"),
    ),
    "OpenCodeReasoning": BuiltinDataset(
        "nvidia/OpenCodeReasoning", Splits("split_0"), input_key="input", output_key="output", subset="split_0"
    ),
}

CODE_ALIASES = {"HumanEval": "humaneval", "MBPP": "mbpp", "LiveCodeBench": "livecodebench"}
CODE_SETS: Mapping[str, BuiltinDataset] = {**_SETS, **{alias: _SETS[name] for alias, name in CODE_ALIASES.items()}}
