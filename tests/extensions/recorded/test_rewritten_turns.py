"""Conversations whose earlier turns the chat template renders otherwise once the conversation goes on, as reasoning models' templates do.

Each reply is trained on once, after exactly what the policy reads when it writes it; the templates are those that TRL carries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.base import Algorithm
from strop.data.packing import pack
from strop.extensions.recorded.examples import Conversation, Preference
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.recorded_tokens import RecordedRules
from strop.extensions.recorded.supervised import SFT, RewardModel
from strop.models.chat_template import ChatTemplate, _warn_of_mode
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Group, Message, Rollout, ToolCall, assistant, user
from support.learners import make_torch_learner
from support.models import build, copy_gradients, largest_difference, to_float64
from support.packed import described, expected, path_rows
from support.recorded import demonstration_group, preference_group, prepare_step
from support.rollouts import with_columns
from support.sweep import one_in
from support.tokenizer import build_tokenizer

pytest.importorskip("trl")

RULES = RecordedRules(max_length=4096)


@dataclass(frozen=True)
class Written:
    """The token with which a template ends a turn, empty for none, and whether calls of tools are tried with it."""

    end: str = "<|im_end|>"
    calls: bool = False


REWRITING = {
    "qwen3": Written(calls=True),
    "qwen3_5_think": Written(calls=True),
    "qwen3_5_nothink": Written(calls=True),
    "qwen3_6": Written(calls=True),
    "gptoss": Written("<|return|>"),
    "nemotron_3_nano": Written(),
    "nemotron_3_super": Written(),
    "nemotron_3_ultra": Written(),
    "nemotron_3_5_lightning": Written(),
    "glm4moe": Written(""),
    "lfm2_2_5": Written(),
    "gemma4_v5": Written("<turn|>"),
    "diffusion_gemma": Written("<turn|>"),
}


@cache
def text_of(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def make(name: str, end: str, **options: Any) -> ChatTemplate:
    """Make TRL's template ``name`` with a tokenizer of bytes that knows its special tokens."""
    tokenizer: Any = build_tokenizer()
    found = dict.fromkeys(re.findall(r"<\|[a-z_]+\|?>|<[a-z]+\|>|<｜[^<>]+｜>|\[gMASK\]|<sop>|</?think>", text_of(name)))
    tokenizer.add_special_tokens({"additional_special_tokens": [*found, *([end] if end else [])]})
    tokenizer.eos_token = end or "<|im_end|>"
    tokenizer.chat_template = text_of(name)
    return ChatTemplate(tokenizer, options=options)


@cache
def template_of(name: str) -> ChatTemplate:
    return make(name, REWRITING[name].end)


def demonstrate(template: ChatTemplate, *messages: Message, rules: RecordedRules = RULES) -> Group:
    return demonstration_group(0, "data", Conversation(id="rows:0", messages=messages), template, rules)


TALK = (user("12 + 7?"), assistant("19"), user("sure?"), assistant("yes"), user("and 1 + 1?"), assistant("2"))


def render(template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
    """The template by Transformers alone."""
    listed = [
        message.as_dict()
        | dict.fromkeys(("reasoning_content", "reasoning", "thinking") if message.reasoning else (), message.reasoning)
        for message in messages
    ]
    text: str = template.tokenizer.apply_chat_template(listed, tokenize=False, **options)
    return text


def inference(template: ChatTemplate, messages: Sequence[Message], end: str) -> list[tuple[str, str]]:
    """What the policy reads and what it writes at each taught turn: the turn rendered as the last, after the prompt that opens it."""
    pairs = []
    for turn, message in enumerate(messages):
        if message.role != "assistant" or not message.in_loss:
            continue
        for mode in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            prompt = render(template, messages[:turn], add_generation_prompt=True, **mode)
            whole = render(template, messages[: turn + 1], **mode)
            if whole.startswith(prompt):
                break
        reply = whole[len(prompt) :].rstrip("\n")
        pairs.append((prompt, reply if reply.endswith(end) else reply + end))
    return pairs


def taught(rollout: Rollout, template: ChatTemplate) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens before each taught turn on its path, and its own."""
    for context, tokens, turns in path_rows(rollout):
        starts = list(accumulate((len(turn.tokens) for turn in turns), initial=context))
        for start, turn in zip(starts, turns, strict=False):
            if turn.sampled:
                yield tokens[:start], turn.tokens.tolist()


words = st.text("the answr is 12?", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def talks(draw: st.DrawFn, calls: bool) -> list[Message]:
    messages = []
    for turn in range(draw(st.integers(1, 4))):
        messages.append(user(draw(words)))
        if calls and draw(st.booleans()):
            call = ToolCall("add", {"a": draw(words)}, id=f"call{turn:05}")
            messages.append(
                Message("assistant", "", (call,), reasoning=draw(st.just("") | words), in_loss=draw(st.integers(0, 3)) > 0)
            )
            messages.append(Message("tool", draw(words), name="add", tool_call_id=call.id))
        messages.append(
            Message("assistant", draw(words), reasoning=draw(st.just("") | words), in_loss=draw(st.integers(0, 3)) > 0)
        )
    messages[-1] = assistant(draw(words)) if draw(st.booleans()) else messages[-1]
    return messages


@pytest.mark.filterwarnings("ignore:the chat template opens a turn")
@pytest.mark.parametrize("name", one_in(4, REWRITING))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_taught_turn_is_what_the_policy_would_write_after_what_it_would_read(name, data):
    template, written = template_of(name), REWRITING[name]
    messages = data.draw(talks(written.calls).filter(lambda drawn: any(m.in_loss for m in drawn if m.role == "assistant")))
    group = demonstrate(template, *messages, rules=RecordedRules(max_length=4096, add_eos=bool(written.end)))
    assert not group.errors
    (rollout,) = group.rollouts
    decode = template.tokenizer.decode
    found = [(decode(context), decode(own)) for context, own in taught(rollout, template)]
    assert sorted(found) == sorted(inference(template, messages, written.end))
    assert rollout.prompt.tolist() == template.tokenizer(decode(rollout.prompt), add_special_tokens=False)["input_ids"]
    last = messages[max(index for index, message in enumerate(messages) if message.role == "assistant" and message.in_loss)]
    assert rollout.text.endswith(last.content) or last.tool_calls, "the main path ends with the last taught turn"
    for shared in (True, False):
        batch = pack([group], share_prefixes=shared)
        assert described(batch) == expected([group])
        assert batch.totals.tokens == sum(len(own) for _, own in taught(rollout, template)) and batch.totals.sequences == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss"])
def test_paths_share_all_that_is_read_alike(name):
    template = template_of(name)
    group = demonstrate(template, *TALK)
    (rollout,) = group.rollouts
    own = [len(turn) for _, turn in taught(rollout, template)]
    opened = len("<think>\n") if name == "qwen3_5_think" else 0  # which the template takes back
    read = len(pack([group]).tokens)
    assert read <= rollout.length + sum(own) + 8 * opened, "no prompt is read twice"
    assert len(rollout.branches) == 2 and all(branch.parent == 0 for branch in rollout.branches)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"])
def test_the_tokens_in_the_loss_are_those_of_trl(name):
    """TRL swaps in a template that keeps every thought, so it reads others before later turns; what is taught is the same."""
    from trl.chat_template_utils import get_training_chat_template

    template = template_of(name)
    training = get_training_chat_template(template.tokenizer)
    assert training is not None
    listed = [message.as_dict() for message in TALK]
    masked = template.tokenizer.apply_chat_template(
        listed, chat_template=training, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = masked["input_ids"], masked["assistant_masks"]
    theirs = "".join(template.tokenizer.decode([token]) if kept else "\0" for token, kept in zip(ids, mask, strict=True))
    theirs_taught = [text.rstrip("\n") for text in re.split("\0+", theirs) if text]
    (rollout,) = demonstrate(template, *TALK).rollouts
    ours = [template.tokenizer.decode(own) for _, own in taught(rollout, template)]
    ours = [*ours[1:], ours[0]]  # the main path, which comes first, is that of the last turn
    assert len(ours) == len(theirs_taught) == 3
    for own, other in zip(ours, theirs_taught, strict=True):
        assert other.endswith(own), "but what the template opens a turn with is not taught"
        assert other.removesuffix(own) in ("", "<think>\n", "<think>\n\n</think>\n\n")


def test_a_turn_is_asked_for_as_the_template_can_write_it_and_that_is_said():
    _warn_of_mode.cache_clear()
    template = make("nemotron_3_nano", "<|im_end|>")
    with pytest.warns(
        UserWarning, match=r"kwargs\.enable_thinking=false to sample with such prompts, too, or enable_thinking=true to leave"
    ):
        (rollout,) = demonstrate(template, *TALK).rollouts
    assert template.tokenizer.decode(rollout.prompt).endswith("<think></think>")
    kept = demonstrate(make("nemotron_3_nano", "<|im_end|>", enable_thinking=True), *TALK)
    assert "opens message 2 with" in (kept.rollouts[0].error or "")


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_template_that_always_opens_a_thought_and_writes_none_says_what_can_be_done(name):
    template = make(name, "<｜end▁of▁sentence｜>")
    (refused,) = demonstrate(template, *TALK).errors
    assert "'rows:0'" in refused and "'<think>\\n'" in refused and "data.add_generation_prompt=false" in refused
    rules = RecordedRules(max_length=512, add_generation_prompt=False)
    (rollout,) = demonstrate(template, *TALK, rules=rules).rollouts
    assert [turn.text for turn in rollout.policy_turns] == ["19", "yes", "2"] and not rollout.branches


def test_reasoning_that_the_template_leaves_out_is_not_lost_in_silence():
    (refused,) = demonstrate(make("gemma4", "<turn|>"), user("1 + 1?"), Message("assistant", "2", reasoning="easy")).errors
    assert "leaves out the reasoning of message 2" in refused


def test_what_does_not_fit_is_the_longest_path():
    template = template_of("qwen3")
    (rollout,) = demonstrate(template, *TALK).rollouts
    longest = max(len(tokens) for _, tokens, _ in path_rows(rollout))
    assert not demonstrate(template, *TALK, rules=RecordedRules(max_length=longest)).errors
    (error,) = demonstrate(template, *TALK, rules=RecordedRules(max_length=longest - 1)).errors
    assert f"it has {longest} tokens" in error


# --- gradients: against plain Transformers, a sequence at a time ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    model = build("llama", layers=1)
    model.resize_token_embeddings(512)
    return to_float64(model)


def plain_logprobs(model: Any, rollout: Rollout, template: ChatTemplate) -> list[torch.Tensor]:
    """Of the tokens of each taught turn, each read alone."""
    sums = []
    for context, own in taught(rollout, template):
        ids = torch.tensor([context + own])
        logits = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        sums.append(logits.gather(1, ids[0, len(context) :, None])[:, 0])
    return sums


def plain_gradient(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return copy_gradients(model)


def talks_of_any_length() -> list[tuple[Message, ...]]:
    return [TALK, TALK[:2], TALK[:4], (user("9?"), Message("assistant", "9", reasoning="so"), user("?"), assistant("ok"))]


@pytest.mark.parametrize("algorithm", [SFT(), SFT(aggregation="sequence_mean")], ids=["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_the_gradient_of_sft_is_that_of_every_turn_read_alone_however_it_is_cut(name, algorithm, model):
    template = template_of(name)
    groups = [demonstrate(template, *talk) for talk in talks_of_any_length()]
    rows = [torch.cat(plain_logprobs(model, group.rollouts[0], template)) for group in groups]
    tokens = -torch.cat(rows).sum() / sum(map(len, rows))
    examples = -torch.stack([row.mean() for row in rows]).mean()
    reference = plain_gradient(model, tokens if algorithm.aggregation == "token_mean" else examples)
    for shared, packed, budget in ((True, True, 10**9), (True, True, 97), (False, True, 1), (False, False, 150)):
        found = gradient_of(model, groups, algorithm, shared=shared, packed=packed, budget=budget)
        assert largest_difference(found, reference) < 1e-8, (shared, packed, budget)


def test_the_gradient_of_dpo_is_that_of_every_turn_read_alone(model):
    template = template_of("qwen3")
    chosen, rejected = TALK[1:], (assistant("20"), user("sure?"), assistant("no"))
    pair = Preference(id="rows:0", prompt=TALK[:1], chosen=chosen, rejected=rejected)
    group = preference_group(0, "data", pair, template, RULES)
    assert not group.errors and [len(rollout.branches) for rollout in group.rollouts] == [2, 1]
    better, worse = (torch.cat(plain_logprobs(model, rollout, template)).sum() for rollout in group.rollouts)
    margin = (better - worse) - (better - worse).detach()  # of a reference that is the policy
    reference = plain_gradient(model, -torch.nn.functional.logsigmoid(0.1 * margin))
    for shared, budget in ((True, 10**9), (False, 1)):
        found = gradient_of(model, [group], DPO(beta=0.1), shared=shared, packed=True, budget=budget)
        assert largest_difference(found, reference) < 1e-8


def gradient_of(model: Any, groups: Sequence[Group], algorithm: Algorithm, *, shared: bool, packed: bool, budget: int) -> Any:
    network = Network(model, precision=torch.float64, chunk=16, packed=packed)
    learner = make_torch_learner(
        network,
        Sampling(),
        optimizer="torch.optim.SGD",
        optimizer_kwargs={"lr": 0.0},
        train_tokens=budget,
        whole_groups=algorithm.whole_groups,
    )
    batch = pack(groups, algorithm.group_credit(groups), share_prefixes=shared)
    with torch.no_grad():
        logprobs = network.outputs(batch, Sampling()).logprobs
    batch = prepare_step(learner, algorithm, algorithm.token_credit(with_columns(batch, logprobs)))
    if "reference_logprobs" in algorithm.requires:
        batch = batch.with_column("reference_logprobs", logprobs)
    model.zero_grad(set_to_none=True)
    learner.forward_backward(batch, algorithm.losses(0)["policy"])
    return copy_gradients(model)


def test_a_reward_model_reads_the_whole_conversation_as_it_is_rendered():
    template = template_of("qwen3")
    pair = Preference(id="rows:0", prompt=TALK[:1], chosen=TALK[1:], rejected=(assistant("20"),))
    rules = RecordedRules(max_length=512, add_generation_prompt=False)
    group = preference_group(0, "data", pair, template, rules)
    batch = pack([group], RewardModel().group_credit([group]))
    assert batch.totals.tokens == 2
    end = int(batch.source[0])
    (path,) = batch.rollout_paths([0])[0]
    start = int(batch.segment_start[path])
    read = template.tokenizer.decode(batch.tokens[start : end + 1])
    assert read == render(template, TALK).rstrip("\n")
