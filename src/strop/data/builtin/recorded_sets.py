"""Recorded answers and preferences. Their layout is detected from their columns (strop.data.recorded.layouts)."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Splits

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
