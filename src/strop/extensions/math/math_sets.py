"""Sets of mathematical problems and of multiple-choice questions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Choices, Condition, Grader, Splits
from strop.data.sources.records import DataError, Record, get_text

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED_LIST = f"{BOXED} Separate several answers with commas."


def read_boxed_solution(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """The answer of a worked solution: the content of its last \\boxed, in braces or, as in some MATH solutions, without."""
    solution = get_text(record, "solution", "output_key", where)
    *_, last = [None, *BOX.finditer(solution)]
    answer = "" if last is None else _read_group(solution, last.end()) if last[1] else solution[last.end() :].split("$")[0]
    if not answer.strip():
        raise DataError(
            f"{where}: 'solution' has no answer in \\boxed. Set output_key to a column of answers, or leave the row out"
        )
    return {"answer": answer.strip()}


def _read_group(text: str, start: int) -> str:
    """Return the text from ``start`` to its closing brace; empty if there is none."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return ""


def word_choice(letters: str) -> str:
    """Return simple-evals' wording of multiple choice; ``letters`` are the letters of the options."""
    return (
        "Answer the following multiple choice question. The last line of your response should be of the following format: "
        f"'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering.\n\n{{question}}"
    )


# Mathematical problems to train on, each with a reference answer.

MATH_TRAINING_SETS: Mapping[str, BuiltinDataset] = {
    "OpenMathInstruct-2": BuiltinDataset("nvidia/OpenMathInstruct-2", Splits("train_1M"), output_key="expected_answer"),
    "DeepScaler": BuiltinDataset("agentica-org/DeepScaleR-Preview-Dataset"),
    "DAPOMath17K": BuiltinDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", input_key="prompt.0.content", output_key="reward_model.ground_truth"
    ),
    "OpenR1-Math-220k": BuiltinDataset("open-r1/OpenR1-Math-220k", subset="default"),
    "NuminaMath-1.5": BuiltinDataset(
        "AI-MO/NuminaMath-1.5",
        keep=(
            Condition("answer", none_of=("", "proof", "notfound")),  # nothing to check
            Condition("question_type", none_of=("proof",)),
            Condition("problem_is_valid", one_of=("Yes",)),
            Condition("solution_is_valid", one_of=("Yes",)),
        ),
    ),
    "MATH-lighteval": BuiltinDataset(
        "DigitalLearningGmbH/MATH-lighteval", Splits("train", evaluation="test"), subset="default", read_row=read_boxed_solution
    ),
    "Big-Math-RL-Verified": BuiltinDataset("SynthLabsAI/Big-Math-RL-Verified"),
    "DeepMath-103K": BuiltinDataset("zwhe99/DeepMath-103K", input_key="question", output_key="final_answer"),
    "ORZ-Math-72k": BuiltinDataset(
        "Open-Reasoner-Zero/orz_math_72k_collection_extended", input_key="0.value", output_key="1.ground_truth.value"
    ),
    "Polaris-Dataset-53K": BuiltinDataset("POLARIS-Project/Polaris-Dataset-53K"),
}


# Mathematical benchmark problems, each graded as usually reported.

SIMPLE_EVALS = "https://openaipublic.blob.core.windows.net/simple-evals"
TEST, ONLY = Splits(None, evaluation="test"), Splits(None, evaluation="train")
LAST_BOX = Grader("math", {"verifier": "boxed"})
OLYMPIAD = Grader("math", {"verifier": "olympiad"})
MINERVA = Grader("math", {"verifier": "minerva"})
LAST_NUMBER = Grader("math", {"verifier": "number"})
STATED = Grader("math", {"verifier": "dapo"})


def _competition(
    hub: str, splits: Splits = ONLY, *, input_key: str = "problem", output_key: str = "answer", subset: str | None = None
) -> BuiltinDataset:
    return BuiltinDataset(hub, splits, input_key, output_key, subset, grader=LAST_BOX, prompt=BOXED)


REPORTED: Mapping[str, BuiltinDataset] = {
    "AIME2024": _competition("HuggingFaceH4/aime_2024"),
    "AIME2025": _competition("opencompass/AIME2025", TEST, input_key="question", subset="AIME2025-I,AIME2025-II"),
    "AIME2026": _competition("MathArena/aime_2026"),
    "AMC": _competition("AI-MO/aimo-validation-amc"),
    "AMC23": _competition("math-ai/amc23", TEST, input_key="question"),
    "HMMT_Feb_2025": _competition("MathArena/hmmt_feb_2025"),
    "BRUMO_2025": _competition("MathArena/brumo_2025"),
    "math": _competition(f"{SIMPLE_EVALS}/math_test.csv", input_key="Question", output_key="Answer"),
    "math500": _competition("HuggingFaceH4/MATH-500", TEST),
    "OlympiadBench": BuiltinDataset(
        "Hothan/OlympiadBench",
        ONLY,
        input_key="question",
        output_key="final_answer.0",
        subset="OE_TO_maths_en_COMP",
        grader=OLYMPIAD,
        prompt=BOXED_LIST,
    ),
    "MinervaMath": BuiltinDataset("math-ai/minervamath", TEST, input_key="question", grader=MINERVA, prompt=BOXED),
    "gsm8k": BuiltinDataset(
        "openai/gsm8k",
        Splits("train", evaluation="test"),
        input_key="question",
        subset="main",
        revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
        answer_marker="####",
        grader=LAST_NUMBER,
        prompt=BOXED,
    ),
    "DAPOMathAIME2024": BuiltinDataset(  # each problem 32 times, in the wording of DAPO's training data
        "BytedTsinghua-SIA/AIME-2024", ONLY, input_key="prompt.0.content", output_key="reward_model.ground_truth", grader=STATED
    ),
}
MATH_ALIASES: Mapping[str, str] = {  # common alternative names
    "aime24": "AIME2024",
    "aime2024": "AIME2024",
    "aime25": "AIME2025",
    "aime2025": "AIME2025",
    "aime26": "AIME2026",
    "aime2026": "AIME2026",
    "amc": "AMC",
    "amc23": "AMC23",
    "hmmt25": "HMMT_Feb_2025",
    "hmmt_feb_2025": "HMMT_Feb_2025",
    "brumo25": "BRUMO_2025",
    "brumo_2025": "BRUMO_2025",
    "MATH-500": "math500",
    "math_500": "math500",
    "olympiadbench": "OlympiadBench",
    "minerva": "MinervaMath",
    "minerva_math": "MinervaMath",
    "GSM8K": "gsm8k",
}
MATH_EVALUATION_SETS: Mapping[str, BuiltinDataset] = {
    **REPORTED,
    **{alias: REPORTED[name] for alias, name in MATH_ALIASES.items()},
}


# Multiple-choice questions: a column with the letter of the right option, or the right option first.

LAST_LETTER = Grader("math", {"verifier": "strict_multichoice"})
FOUR = word_choice("ABCD")
MMLU_LETTERS = Choices(options=("A", "B", "C", "D"))
MMLU_LANGUAGES = (
    *(
        "AR-XY",
        "BN-BD",
        "DE-DE",
        "ES-LA",
        "FR-FR",
        "HI-IN",
        "ID-ID",
        "IT-IT",
        "JA-JP",
        "KO-KR",
        "PT-BR",
        "ZH-CN",
        "SW-KE",
        "YO-NG",
    ),
)


def _mmlu(language: str = "") -> BuiltinDataset:
    return BuiltinDataset(
        f"{SIMPLE_EVALS}/mmlu{language}.csv",
        Splits(None, evaluation="train"),  # the only split of a file at a URL
        input_key="Question",
        output_key="Answer",
        choices=MMLU_LETTERS,
        grader=LAST_LETTER,
        prompt=FOUR,
    )


def _mmmlu(subset: str) -> BuiltinDataset:
    return BuiltinDataset(
        "openai/MMMLU",
        Splits(None, evaluation="test"),
        input_key="Question",
        output_key="Answer",
        subset=subset,
        choices=MMLU_LETTERS,
        grader=LAST_LETTER,
        prompt=FOUR,
    )


def _gpqa(subset: str) -> BuiltinDataset:
    options = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return BuiltinDataset(
        "Idavidrein/gpqa",
        Splits(None, evaluation="train"),
        input_key="Question",
        output_key=options[0],
        subset=subset,
        choices=Choices(options=options, first_is_correct=True),
        grader=LAST_LETTER,
        prompt=FOUR,
    )


REPORTED_CHOICES: Mapping[str, BuiltinDataset] = {
    "mmlu": _mmlu(),
    **{f"mmlu_{language}": _mmlu(f"_{language}") for language in MMLU_LANGUAGES},
    "mmmlu": _mmmlu("default"),  # all languages
    **{f"mmmlu_{language}": _mmmlu(language.replace("-", "_")) for language in MMLU_LANGUAGES},
    "mmlu_pro": BuiltinDataset(
        "TIGER-Lab/MMLU-Pro",
        Splits(None, validation="validation", evaluation="test"),
        input_key="question",
        choices=Choices(options=("options",)),
        grader=LAST_LETTER,
        prompt=word_choice("A, B, C, D, E, F, G, H, I, J"),
    ),
    "gpqa": _gpqa("gpqa_main"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
}
CHOICE_ALIASES: Mapping[str, str] = {  # common alternative names
    "MMLU": "mmlu",
    "mmlu_EN-US": "mmlu",
    "MMMLU": "mmmlu",
    "MMLU-Pro": "mmlu_pro",
    "mmlu-pro": "mmlu_pro",
    "GPQA": "gpqa",
    "GPQA-diamond": "gpqa_diamond",
    "gpqa-diamond": "gpqa_diamond",
}
CHOICE_SETS: Mapping[str, BuiltinDataset] = {
    **REPORTED_CHOICES,
    **{alias: REPORTED_CHOICES[name] for alias, name in CHOICE_ALIASES.items()},
}

MATH_SETS: Mapping[str, BuiltinDataset] = {**MATH_TRAINING_SETS, **MATH_EVALUATION_SETS, **CHOICE_SETS}
