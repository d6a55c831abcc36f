"""The built-in data sets by name, with those of extensions (``strop.datasets``: a mapping of names to sets)."""

from __future__ import annotations

from collections.abc import Mapping

from strop import plugins
from strop.data.builtin_dataset import BuiltinDataset, Choices, Condition, Grader, Splits

BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED_LIST = f"{BOXED} Separate several answers with commas."


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
        "DigitalLearningGmbH/MATH-lighteval", Splits("train", evaluation="test"), subset="default", row_reader="boxed_solution"
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


# Recorded answers and preferences. Their layout is detected from their columns (strop.extensions.recorded.layouts).

ULTRAFEEDBACK = BuiltinDataset(
    "HuggingFaceH4/ultrafeedback_binarized",
    Splits("train_prefs", validation="test_prefs"),
    revision="3949bf5f8c17c394422ccfab0c31ea9c20bdeb85",
)
NEMOTRON_SPLITS = Splits("chat+code+math+stem")

CONVERSATION_SETS: Mapping[str, BuiltinDataset] = {
    "squad": BuiltinDataset(
        "rajpurkar/squad",
        Splits("train", validation="validation"),
        input_key="question",
        output_key="answers.text.0",
        revision="7b6d24c440a36b6815f21b70d25016731768db1f",
    ),
    "tulu3_sft_mixture": BuiltinDataset("allenai/tulu-3-sft-mixture"),
    "open_assistant": BuiltinDataset(
        "hf://datasets/OpenAssistant/oasst1/2023-04-12_oasst_all.trees.jsonl.gz",
        revision="fdf72ae0827c1cda404aff25b6603abec9e3399b",
        row_reader="conversation_trees",
    ),
    "Nemotron-Cascade-2-SFT-Math": BuiltinDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subset="math"),
    "Nemotron-Post-Training-Dataset-v1": BuiltinDataset("nvidia/Nemotron-Post-Training-Dataset-v1", NEMOTRON_SPLITS),
    "Nemotron-Post-Training-Dataset-v2": BuiltinDataset("nvidia/Nemotron-Post-Training-Dataset-v2", NEMOTRON_SPLITS),
    "Llama-Nemotron-Post-Training-Dataset": BuiltinDataset(
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        Splits("chat+code+math+science+safety"),
        input_key="input",
        output_key="output",
        subset="SFT",
        system_key="system_prompt",
    ),
    "ultrachat_200k": BuiltinDataset(
        "HuggingFaceH4/ultrachat_200k",
        Splits("train_sft", validation="test_sft"),
        revision="8049631c405ae6576f93f445c6b8166f76f5505a",
    ),
    "Capybara": BuiltinDataset("trl-lib/Capybara", Splits("train", validation="test")),
    "smoltalk": BuiltinDataset("HuggingFaceTB/smoltalk", Splits("train", validation="test"), subset="all"),
    "tldr": BuiltinDataset("trl-lib/tldr", Splits("train", "validation", "test"), input_key="prompt", output_key="completion"),
}

PREFERENCE_SETS: Mapping[str, BuiltinDataset] = {
    "HelpSteer3": BuiltinDataset(
        "nvidia/HelpSteer3",
        Splits("train", validation="validation"),
        input_key="context",
        output_key="response",  # the preferred answer, for supervised training
        subset="preference",
        row_reader="preferred_response",
    ),
    "Tulu3Preference": BuiltinDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    "UltraFeedback": ULTRAFEEDBACK,
    "HuggingFaceH4/ultrafeedback_binarized": ULTRAFEEDBACK,
    "trl-lib/ultrafeedback_binarized": BuiltinDataset("trl-lib/ultrafeedback_binarized", Splits("train", validation="test")),
    "hh-rlhf": BuiltinDataset(
        "Anthropic/hh-rlhf",
        Splits("train", validation="test"),
        revision="09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        row_reader="dialogues",
    ),
    "Skywork-Reward-Preference-80K-v0.2": BuiltinDataset("Skywork/Skywork-Reward-Preference-80K-v0.2"),
}

RECORDED_SETS: Mapping[str, BuiltinDataset] = {**CONVERSATION_SETS, **PREFERENCE_SETS}


# Requests with instructions that can be checked, for the environment ``ifeval``.

_IFEVAL = BuiltinDataset(
    "google/IFEval",
    Splits(None, evaluation="train"),
    input_key="prompt",
    output_key="",
    revision="966cd89545d6b6acfd7638bc708b98261ca58e84",
    grader=Grader("ifeval"),
)

INSTRUCTION_SETS: Mapping[str, BuiltinDataset] = {
    "ifeval": _IFEVAL,
    "IFEval": _IFEVAL,
    "RLVR-IFeval": BuiltinDataset(
        "allenai/RLVR-IFeval",
        input_key="messages",
        output_key="",
        revision="47c03c73621c4aab2b824b7818681117d662770e",
        grader=Grader("ifeval"),
    ),
}


# Questions about images, with the same columns and answers that NeMo-RL uses.


def _grade(answer: str, format_weight: float, **kwargs: float) -> Grader:
    """Return NeMo-RL's rewards for a set: its format, and its answer."""
    options = {"kwargs": kwargs} if kwargs else {}
    formatted = {"name": "format", "weight": format_weight}
    return Grader("vlm", {"rewards": [formatted, {"name": answer, "weight": 1 - format_weight, **options}]})


IMAGE_SETS: Mapping[str, BuiltinDataset] = {
    "clevr-cogent": BuiltinDataset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        Splits("train", "valA", "valB"),
        row_reader="tagged_solution",
        split_hubs={"valA": "MMInstruction/Clevr_CoGenT_ValA", "valB": "MMInstruction/Clevr_CoGenT_ValB"},
        grader=_grade("exact_alnum", 0.2),
    ),
    "geometry3k": BuiltinDataset(
        "hiyouga/geometry3k", Splits("train", "validation", "test"), row_reader="single_image", grader=_grade("math_expr", 0.1)
    ),
    "refcoco": BuiltinDataset(
        "jxu124/refcoco",
        Splits("train", "validation", "test"),
        row_reader="described_region",
        media_files="the images of COCO 2014, in its folders train2014 and val2014",
        grader=_grade("bbox_giou", 0.1, giou_penalty_thres=0.5),
    ),
    "mmpr-tiny": BuiltinDataset(
        "OpenGVLab/MMPR-Tiny",
        subset="default",
        files={"default": ("mmpr_tiny.parquet",)},
        keep=(Condition("images", at_most=1),),  # as NeMo-RL reads it
        row_reader="reasoning_question",
        media_files="the folder images of its images.zip, as MMPR-Tiny/images",
        grader=Grader("vlm", {"rewards": [{"name": "geo3k", "weight": 1.0, "kwargs": {"format_score": 0.1}}]}),
    ),
}


BUILTIN_DATASETS: Mapping[str, BuiltinDataset] = {
    **MATH_TRAINING_SETS,
    **MATH_EVALUATION_SETS,
    **CHOICE_SETS,
    **RECORDED_SETS,
    **INSTRUCTION_SETS,
    **IMAGE_SETS,
    **{name: each for group in plugins.declared("datasets") for name, each in plugins.load("datasets", group).items()},
}
