"""Mathematical problems to train on, each with a reference answer."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Condition, Splits

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
