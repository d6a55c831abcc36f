"""Recorded answers and preferences. Their layout is detected from their columns (strop.data.recorded.layouts)."""

from __future__ import annotations

from collections.abc import Mapping

from strop.data.builtin.builtin_dataset import BuiltinDataset, Splits

RECORDED_SETS: Mapping[str, BuiltinDataset] = {
    "squad": BuiltinDataset(
        "rajpurkar/squad", Splits("train", validation="validation"), input_key="question", output_key="answers.text.0"
    ),
    "tulu3_sft_mixture": BuiltinDataset("allenai/tulu-3-sft-mixture"),
    "Nemotron-Cascade-2-SFT-Math": BuiltinDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subset="math"),
    "HelpSteer3": BuiltinDataset("nvidia/HelpSteer3", Splits("train", validation="validation"), subset="preference"),
    "Tulu3Preference": BuiltinDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    "HuggingFaceH4/ultrafeedback_binarized": BuiltinDataset(
        "HuggingFaceH4/ultrafeedback_binarized", Splits("train_prefs", validation="test_prefs")
    ),
}
