"""Which tensors of a model are fake-quantised, and to which format: read from ``policy.quant_cfg``, in the form of ModelOpt.

A linear layer ``model.layers.0.mlp.down_proj`` has the quantisers ``model.layers.0.mlp.down_proj.weight_quantizer`` and
``model.layers.0.mlp.down_proj.input_quantizer``. Rules apply in order, and later ones win. This module imports no torch: configurations are
checked with it.

quantize:
  algorithm: max
  quant_cfg:
    - quantizer_name: '*'
      enable: false
    - quantizer_name: '*weight_quantizer'
      cfg: {num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}
    - quantizer_name: '*lm_head*'
      enable: false
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from strop.storage.files import read_text_file

Quantizer = Literal["weight_quantizer", "input_quantizer"]

# What Hugging Face's layers are called by Megatron Core and by vLLM, which fuse some of them: a rule for any name is one for all.
_OTHER_NAMES = {
    "q_proj": ("qkv_proj", "linear_qkv"),
    "k_proj": ("qkv_proj", "linear_qkv"),
    "v_proj": ("qkv_proj", "linear_qkv"),
    "o_proj": ("linear_proj",),
    "gate_proj": ("gate_up_proj", "linear_fc1"),
    "up_proj": ("gate_up_proj", "linear_fc1"),
    "gate_up_proj": ("gate_proj", "up_proj", "linear_fc1"),
    "down_proj": ("linear_fc2",),
    "lm_head": ("output_layer",),
}
_OTHER_PARTS = (
    (".self_attn.", ".self_attention."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.experts.", ".experts."),
)


@dataclass(frozen=True)
class QuantizerFormat:
    """The format of one quantiser."""

    name: str  # of a number format: fp8_tensor, fp8_row, fp8_block, fp8_group, mxfp8, mxfp4_ceil, nvfp4, nvfp4_32
    constant_amax: bool = False  # the scale is 1: values are rounded as they are

    @property
    def static_inputs(self) -> bool:
        """Whether inputs in this format have a scale of the whole tensor, which is calibrated once (``input_quantizer`` of ModelOpt)."""
        return not self.constant_amax and self.name in ("fp8_tensor", "nvfp4", "nvfp4_32")


@dataclass(frozen=True)
class QuantizerRule:
    """A rule about all quantisers whose name a pattern matches, as in ``fnmatch``."""

    pattern: str
    enabled: bool
    format: QuantizerFormat | None = None  # None: that of an earlier rule


@dataclass(frozen=True)
class QuantizerRules:
    """The rules of one configuration."""

    source: str  # the name or the file, for messages
    rules: tuple[QuantizerRule, ...]

    def weight_format(self, layer: str) -> QuantizerFormat | None:
        """Return the format of the weight of a linear layer, by the name of the layer in the Hugging Face model; None: not quantised."""
        return self._find(layer, "weight_quantizer")

    def input_format(self, layer: str) -> QuantizerFormat | None:
        """Return the format of the input of a linear layer; None: not quantised."""
        return self._find(layer, "input_quantizer")

    def find(self, quantizer: str) -> QuantizerFormat | None:
        """Return the format of the quantiser with this very name; None: it is disabled."""
        return self._apply([quantizer])

    @property
    def may_calibrate(self) -> bool:
        """Whether the inputs of any layer may have a static scale, which needs calibration."""
        inputs = (rule for rule in self.rules if rule.enabled and _may_match(rule.pattern, "input_quantizer"))
        return any(rule.format is not None and rule.format.static_inputs for rule in inputs)

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of any layer may be rounded."""
        return any(rule.enabled and _may_match(rule.pattern, "input_quantizer") for rule in self.rules)

    def _find(self, layer: str, quantizer: Quantizer) -> QuantizerFormat | None:
        return self._apply([f"{name}.{quantizer}" for name in other_names(layer)])

    def _apply(self, names: Sequence[str]) -> QuantizerFormat | None:
        enabled, chosen = False, None
        for rule in self.rules:
            if any(fnmatchcase(name, rule.pattern) for name in names):
                enabled, chosen = rule.enabled, rule.format or chosen
        return chosen if enabled else None


def other_names(layer: str) -> list[str]:
    """Return the names that a layer has in Hugging Face's models, in Megatron Core and in vLLM."""
    names = [layer]
    for here, there in _OTHER_PARTS:
        names += [name.replace(here, there) for name in names if here in name]
    return [each for name in dict.fromkeys(names) for each in _renamed(name)]


def _renamed(name: str) -> Iterator[str]:
    folder, dot, last = name.rpartition(".")
    yield name
    for other in _OTHER_NAMES.get(last, ()):
        yield f"{folder}{dot}{other}"


def _may_match(pattern: str, quantizer: str) -> bool:
    """Return whether a pattern may match a quantiser of this kind: its end does."""
    end = pattern.rpartition(".")[2].lstrip("*")
    return pattern == "*" or pattern.endswith("*") or quantizer.endswith(end) or end in quantizer


FP8 = {"num_bits": "e4m3"}
FP8_ROWS = {"num_bits": "e4m3", "axis": 0}
FP8_TOKENS = {"num_bits": "e4m3", "type": "dynamic", "block_sizes": {-1: None}}
FP8_BLOCKS = {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}}
MXFP8 = {"num_bits": "e4m3", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}}
MXFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}}
NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
NVFP4_BLOCKS_OF_32 = {"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e4m3"}}

# Layers that stay in high precision in every preset.
DISABLED = (
    "*block_sparse_moe.gate*", "*linear_attn.conv1d*", "*self_attention.conv1d*", "*linear_attn.in_proj_a*", "*linear_attn.in_proj_b*",
    "*lm_head*", "*mixer.conv1d*", "*mlp.gate.*", "*mlp.shared_expert_gate.*", "*output_layer*", "*proj_out.*", "*router*", "mtp.*",
    "output.*", "*embed_vision*", "*vision_tower*", "*visual*", "*vision_model*", "*multi_modal_projector*",
)  # fmt: skip
ATTENTION_OF_HYBRIDS = (
    "*fc1_latent_proj*", "*fc2_latent_proj*", "*q_proj*", "*k_proj*", "*v_proj*", "*o_proj*", "*self_attention.linear_qkv*",
    "*self_attention.linear_proj*",
)  # fmt: skip
CONSERVATIVE = (*ATTENTION_OF_HYBRIDS, "*mixer.in_proj*", "*mixer.out_proj*")
ALL = ("*",)
MLP = ("*mlp*", "*block_sparse_moe*")
MLP_AND_EXPERTS = ("*mlp*", "*.mixer.up_proj.", "*.mixer.down_proj.", "*block_sparse_moe*", "*.experts.*")
EXPERTS = ("*block_sparse_moe*", "*.experts.*")


def _preset(
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    layers: tuple[str, ...] = ALL,
    disabled: tuple[str, ...] = DISABLED,
) -> list[dict[str, Any]]:
    """Return the entries of a preset: nothing, then the weights and inputs of ``layers``, and not the ``disabled`` ones."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for layer in layers:
        entries.append({"quantizer_name": f"{layer}weight_quantizer", "cfg": weights})
        if inputs is not None:
            entries.append({"quantizer_name": f"{layer}input_quantizer", "cfg": inputs})
    return entries + [{"quantizer_name": pattern, "enable": False} for pattern in disabled]


PRESETS: Mapping[str, list[dict[str, Any]]] = {
    "FP8_DEFAULT_CFG": _preset(FP8, FP8),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": _preset(FP8_ROWS, FP8_TOKENS),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": _preset(FP8_BLOCKS),
    "MAMBA_MOE_FP8_AGGRESSIVE_CFG": _preset(FP8, FP8, disabled=(*DISABLED, *ATTENTION_OF_HYBRIDS)),
    "MAMBA_MOE_FP8_CONSERVATIVE_CFG": _preset(FP8, FP8, disabled=(*DISABLED, *CONSERVATIVE)),
    "MXFP8_DEFAULT_CFG": _preset(MXFP8, MXFP8),
    "MXFP4_DEFAULT_CFG": _preset(MXFP4, MXFP4),
    "MXFP4_MLP_WEIGHT_ONLY_CFG": _preset(MXFP4, layers=MLP),
    "W4A8_MXFP4_FP8_CFG": _preset(MXFP4, FP8),
    "NVFP4_DEFAULT_CFG": _preset(NVFP4, NVFP4),
    "W4A16_NVFP4_CFG": _preset(NVFP4),
    "W4A8_NVFP4_FP8_CFG": _preset(NVFP4_BLOCKS_OF_32, FP8),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": _preset(NVFP4_BLOCKS_OF_32, layers=MLP),
    "NVFP4_MLP_ONLY_CFG": _preset(NVFP4, NVFP4, MLP_AND_EXPERTS),
    "NVFP4_OMLP_ONLY_CFG": _preset(NVFP4, NVFP4, ("*o_proj*", *MLP_AND_EXPERTS[:-1])),
    "NVFP4_EXPERTS_ONLY_CFG": _preset(NVFP4, NVFP4, EXPERTS),
    "MAMBA_MOE_NVFP4_AGGRESSIVE_CFG": _preset(NVFP4, NVFP4, disabled=(*DISABLED, *ATTENTION_OF_HYBRIDS)),
    "MAMBA_MOE_NVFP4_CONSERVATIVE_CFG": _preset(NVFP4, NVFP4, disabled=(*DISABLED, *CONSERVATIVE)),
}

# Names of ModelOpt that are refused, and what they need that is not here.
REFUSED_PRESETS: Mapping[str, str] = {
    **dict.fromkeys(
        ("FP8_KV_CFG", "FP8_AFFINE_KV_CFG", "NVFP4_KV_CFG", "NVFP4_AFFINE_KV_CFG", "NVFP4_KV_ROTATE_CFG", "NVFP4_FP8_MHA_CONFIG"),
        "quantises keys and values of attention, which the learner computes in high precision",
    ),
    **dict.fromkeys(
        (
            "INT8_DEFAULT_CFG",
            "INT8_SMOOTHQUANT_CFG",
            "INT8_WEIGHT_ONLY_CFG",
            "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
            "MXINT8_DEFAULT_CFG",
        ),
        "quantises to integers",
    ),
    **dict.fromkeys(
        ("INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_AWQ_CLIP_CFG", "NVFP4_AWQ_FULL_CFG"),
        "searches scales of channels (AWQ)",
    ),
    **dict.fromkeys(
        ("NVFP4_FOUR_OVER_SIX_CFG", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG"),
        "searches the scale of each block",
    ),
    "NVFP4_SVDQUANT_DEFAULT_CFG": "adds a low-rank correction of the weights (SVDQuant)",
    "MXFP6_DEFAULT_CFG": "quantises to FP6",
}


# Quantisers of tensors that are neither weights nor inputs of linear layers; the names stand for those of any layer.
OTHER_QUANTIZERS = {
    "model.layers.0.mlp.down_proj.output_quantizer": "outputs of layers",
    "model.layers.0.self_attn.q_bmm_quantizer": "queries of attention",
    "model.layers.0.self_attn.k_bmm_quantizer": "keys of attention",
    "model.layers.0.self_attn.v_bmm_quantizer": "values of attention",
    "model.layers.0.self_attn.p_bmm_quantizer": "weights of attention",
}
_IGNORED = {
    "effective_bits",
    "pass_through_bwd",
    "fake_quant",
    "unsigned",
    "narrow_range",
    "calibrator",
    "trt_high_precision_dtype",
}
_E4M3, _E2M1, _E8M0 = ("e4m3", (4, 3)), ("e2m1", (2, 1)), ("e8m0", (8, 0))


class QuantConfigError(ValueError):
    """A configuration of quantisation that cannot be used; ``fix`` says what to set instead."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def read_quant_config(source: str) -> QuantizerRules:
    """Return the rules of a name of ModelOpt, such as NVFP4_DEFAULT_CFG, or of a YAML file. Raises QuantConfigError."""
    if source in PRESETS:
        return _make_rules(source, PRESETS[source])
    if source in REFUSED_PRESETS:
        raise QuantConfigError(
            f"found {source}, which {REFUSED_PRESETS[source]}: that is not in this version",
            "Set it to a configuration of rounded weights and inputs: " + ", ".join(sorted(PRESETS)) + ", or a YAML file.",
        )
    return _read_file(source, Path(source).expanduser())


def _read_file(source: str, path: Path) -> QuantizerRules:
    if not path.is_file():
        near = difflib.get_close_matches(source, PRESETS, n=1, cutoff=0.6)
        raise QuantConfigError(
            f"found {source!r}, which is neither a configuration of ModelOpt that is known here nor a file",
            f"Did you mean {near[0]}?" if near else "Set it to one of " + ", ".join(sorted(PRESETS)) + ", or a YAML file.",
        )
    return _parse(source, read_text_file(path))


@cache
def _parse(source: str, text: str) -> QuantizerRules:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        document = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise QuantConfigError(f"{source} is not YAML: {str(error).splitlines()[0]}", "Correct the file.") from error
    section = document.get("quantize", document) if isinstance(document, Mapping) else None
    entries = section.get("quant_cfg") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(entries, Sequence | Mapping) or isinstance(entries, str):
        raise QuantConfigError(
            f"{source} has no list quant_cfg, at the top or under quantize", "Write it as the recipes of ModelOpt are."
        )
    if (algorithm := section.get("algorithm", "max")) not in ("max", None, {"method": "max"}):
        raise QuantConfigError(
            f"{source} asks for the algorithm {algorithm!r}, and scales are greatest magnitudes here",
            "Set algorithm: max in the file.",
        )
    if "$import" in text:
        raise QuantConfigError(
            f"{source} imports other files ($import), which are not read", "Write their entries into the file."
        )
    return _make_rules(source, _as_list(entries))


def _as_list(entries: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    """Return the entries of a list, or of the older form {pattern: {num_bits: ..., enable: ...}}."""
    if not isinstance(entries, Mapping):
        return list(entries)
    listed: list[Any] = []
    for pattern, options in entries.items():
        options = dict(options) if isinstance(options, Mapping) else {"enable": options}
        enable = options.pop("enable", True)
        entry = {"quantizer_name": "*" if pattern == "default" else pattern, "enable": enable}
        listed.append({**entry, "cfg": options} if options else entry)
    return listed


def _make_rules(source: str, entries: Sequence[Any]) -> QuantizerRules:
    rules = QuantizerRules(source, tuple(_read_entries(source, entries)))
    _check_other_quantizers(rules)
    return rules


def _read_entries(source: str, entries: Sequence[Any]) -> Iterator[QuantizerRule]:
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("quantizer_name"), str):
            raise QuantConfigError(f"entry {number} of {source} has no quantizer_name: {entry!r:.80}", "Give it one.")
        if entry.get("parent_class") not in (None, "nn.Linear"):  # of layers that are not linear, which are never quantised here
            continue
        pattern, options = entry["quantizer_name"], entry.get("cfg")
        enabled = entry.get("enable", True)
        unknown = set(entry) - {"quantizer_name", "parent_class", "cfg", "enable"}
        if unknown or not isinstance(enabled, bool):
            raise QuantConfigError(
                f"entry {number} of {source} ({pattern}) has {sorted(unknown) or f'enable: {enabled!r}'}, which is not known",
                "An entry has quantizer_name, cfg, enable (true or false) and parent_class.",
            )
        yield QuantizerRule(pattern, enabled, None if not options or not enabled else _read_format(source, pattern, options))


def _read_format(source: str, pattern: str, options: Any) -> QuantizerFormat:
    """Return the format of an entry's ``cfg``. Raises QuantConfigError for one that does not exist here."""
    if isinstance(options, Mapping):
        name = _find_format(options, weights="input_quantizer" not in pattern)
        if name is not None:
            return QuantizerFormat(name, constant_amax=options.get("use_constant_amax", False))
    raise QuantConfigError(
        f"the quantiser {pattern} of {source} has the format {options!r:.200}, which is not in this version",
        "Formats are FP8 (num_bits e4m3: of the tensor, axis: 0, or block_sizes 128), MXFP8, MXFP4 (blocks of 32, scale_bits e8m0) and "
        "NVFP4 (num_bits e2m1, blocks of 16 or 32, type: dynamic, scale_bits e4m3).",
    )


def _find_format(options: Mapping[str, Any], *, weights: bool) -> str | None:
    known = {"num_bits", "axis", "block_sizes", "type", "enable", "use_constant_amax"} | _IGNORED
    bits = options.get("num_bits")
    bits = tuple(bits) if isinstance(bits, Sequence) and not isinstance(bits, str) else bits
    if set(options) - known or bits not in (*_E4M3, *_E2M1):
        return None
    sizes = options.get("block_sizes")
    if sizes is not None and not isinstance(sizes, Mapping):
        return None
    blocks = {int(axis): size for axis, size in (sizes or {}).items() if str(axis).lstrip("-").isdigit()}
    scale = (sizes or {}).get("scale_bits")
    scale = tuple(scale) if isinstance(scale, Sequence) and not isinstance(scale, str) else scale
    kind = (sizes or {}).get("type", options.get("type"))
    if bits in _E2M1:
        return _find_fp4(blocks, scale, kind)
    return _find_fp8(blocks, scale, kind, options.get("axis"), weights=weights)


def _find_fp4(blocks: Mapping[int, Any], scale: Any, kind: Any) -> str | None:
    if kind == "static":  # blocks whose scales stay while the weights change
        return None
    if scale in _E8M0:
        return {32: "mxfp4_ceil"}.get(blocks[-1]) if set(blocks) == {-1} else None
    if scale in _E4M3 and set(blocks) == {-1}:
        return {16: "nvfp4", 32: "nvfp4_32"}.get(blocks[-1])
    return None


def _find_fp8(blocks: Mapping[int, Any], scale: Any, kind: Any, axis: Any, *, weights: bool) -> str | None:
    if scale in _E8M0:
        return "mxfp8" if blocks == {-1: 32} else None
    if scale is not None:
        return None
    if not blocks:
        if axis is None:  # inputs with a dynamic scale of the whole tensor would depend on what else is in the micro-batch
            return "fp8_tensor" if weights or kind != "dynamic" else None
        return "fp8_row" if axis == 0 and weights else None
    return {((-1, None),): "fp8_row", ((-1, 128),): "fp8_group", ((-2, 128), (-1, 128)): "fp8_block" if weights else None}.get(
        tuple(sorted(blocks.items()))
    )


def _check_other_quantizers(rules: QuantizerRules) -> None:
    """Raise QuantConfigError if tensors are to be quantised that stay in high precision here."""
    for name, what in OTHER_QUANTIZERS.items():
        if rules.find(name) is not None:
            raise QuantConfigError(
                f"{rules.source} quantises {what}, which the learner computes in high precision",
                f"Disable it in your own YAML file (quantizer_name: '*{name.rpartition('.')[2]}', enable: false).",
            )
    if rules.weight_format("lm_head") is not None or rules.input_format("lm_head") is not None:
        raise QuantConfigError(
            f"{rules.source} quantises the output layer, whose log-probabilities are computed in tiles of high precision",
            "Disable it in your own YAML file (quantizer_name: '*lm_head*', enable: false).",
        )
    if not any(rule.enabled and rule.format is not None for rule in rules.rules):
        raise QuantConfigError(f"{rules.source} quantises nothing", "Enable a quantiser with a cfg, or set it to null.")
