"""Keys of ``policy`` about fake quantisation, which are NeMo-RL's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from strop.base_config import BaseConfig
from strop.models.fake_quant.modelopt_config import QuantConfigError, read_quant_config
from strop.problems import Problem


class QuantConfig(BaseConfig):
    """Fake quantisation of the policy (quantisation-aware training): ``quant_cfg`` and the calibration of its scales."""

    identity_keys: ClassVar[tuple[str, ...]] = ("quant_cfg", "quant_calib_data", "quant_calib_size", "quant_sequence_length")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("quant_batch_size",)

    quant_cfg: str | None = Field(
        None,
        description="Train with rounded weights and inputs of linear layers, and sample with the same: a configuration of ModelOpt "
        "(NVFP4_DEFAULT_CFG, FP8_DEFAULT_CFG, ...) or a YAML file in the form of its recipes; null rounds nothing (fp8).",
    )
    quant_calib_data: str | None = Field(
        None,
        description="Texts that find the scales of inputs before training, where quant_cfg has scales of whole tensors: cnn_dailymail or "
        "another data set of the hub, a file of texts (.txt, .jsonl), or random (tokens).",
    )
    quant_calib_size: int = Field(512, ge=1, description="Texts of quant_calib_data that are read (texts).")
    quant_batch_size: int = Field(32, ge=1, description="Texts of a forward pass of the calibration (texts).")
    quant_sequence_length: int = Field(1024, ge=2, description="Tokens that are read of each text of the calibration (tokens).")

    @field_validator("quant_cfg")
    @classmethod
    def _resolve_file(cls, value: str | None) -> str | None:
        """Make the path of a file absolute: ranks may have another working directory."""
        path = None if value is None else Path(value).expanduser()
        return value if path is None or not path.is_file() else str(path.resolve())

    def quant_errors(self, key: str) -> Iterator[Problem]:
        """Yield what is wrong with these keys themselves, in the section ``key``."""
        if self.quant_cfg is None:
            return
        try:
            rules = read_quant_config(self.quant_cfg)
        except QuantConfigError as error:
            yield Problem(f"{key}.quant_cfg", str(error), error.fix)
            return
        if rules.may_calibrate and self.quant_calib_data is None:
            yield Problem(
                f"{key}.quant_calib_data",
                f"found null, but {self.quant_cfg} rounds inputs with scales of whole tensors, which texts must find before training: a "
                "scale of each micro-batch would change the gradient with how a batch is cut",
                f"Set it to cnn_dailymail, a file of texts, or random; or {key}.quant_cfg to a configuration with scales of tokens or "
                "blocks, or of weights alone.",
            )

    @property
    def rounds_inputs(self) -> bool:
        """Whether quant_cfg rounds inputs of layers, not only weights."""
        return self.quant_cfg is not None and read_quant_config(self.quant_cfg).rounds_inputs
