"""Recorded examples become groups that train as sampled ones do, and an example that cannot says why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.extensions.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.extensions.recorded.planned_groups import make_group, plan_unpaired_preference
from strop.extensions.recorded.recorded_tokens import RecordedRules
from strop.models.chat_template import ChatTemplate
from strop.types import Ending, Group, Message, Rollout, assistant, system, user
from support.chat_templates import FAMILIES, GEMMA, GLM, LLAMA3, QWEN3, Family, make_tokenizer
from support.recorded import demonstration_group, preference_group
from support.rollouts import pack_grpo

CHATML = FAMILIES["chatml"]
RULES = RecordedRules(max_length=512)
PROMPT = (system("Add."), user("12 + 7?"))


def template_of(family: Family = CHATML) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(family))


def talk(*messages: Message) -> Conversation:
    return Conversation(id="rows:0", messages=messages)


def pair(
    chosen: str = "19", rejected: str = "20", *, prompt: tuple[Message, ...] = PROMPT, margin: float | None = None
) -> Preference:
    return Preference(id="rows:0", prompt=prompt, chosen=(assistant(chosen),), rejected=(assistant(rejected),), margin=margin)


def verdict(said: str, *, desirable: bool = True, id: str = "rows:0") -> UnpairedPreference:
    return UnpairedPreference(id=id, prompt=PROMPT, completion=(assistant(said),), desirable=desirable)


def written(rollout: Rollout, template: ChatTemplate) -> str:
    return template.tokenizer.decode(rollout.tokens())


def error_of(group: Group) -> str:
    (rollout,) = group.rollouts
    assert rollout.ending == Ending.ERROR and group.errors == (rollout.error,)
    return rollout.error or ""


def test_a_demonstration_teaches_every_reply_and_reads_the_rest():
    template = template_of()
    example = talk(user("12 + 7?"), assistant("19"), user("sure?"), assistant("yes"))
    group = demonstration_group(3, "data", example, template, RULES)
    (rollout,) = group.rollouts
    assert (group.index, group.environment, group.task, group.errors) == (3, "data", example, ())
    assert rollout.prompt.tolist() == template.encode_prompt(example.messages[:1])
    assert [turn.author for turn in rollout.turns] == ["policy", "environment", "policy"]
    assert [turn.text for turn in rollout.policy_turns] == ["19", "yes"]
    assert written(rollout, template).endswith(
        "19<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )
    assert (rollout.ending, rollout.seed, rollout.messages) == (Ending.STOP, 0, example.messages)


def test_nobody_sampled_a_taught_token():
    (rollout,) = demonstration_group(0, "data", talk(*PROMPT, assistant("19")), template_of(), RULES).rollouts
    (turn,) = rollout.turns
    assert not turn.logprobs.any() and turn.versions.tolist() == [-1] * len(turn.tokens)
    assert turn.tokens.dtype == torch.int64 and turn.logprobs.dtype == torch.float32 and turn.versions.dtype == torch.int32


def test_the_final_turn_alone_can_be_taught():
    template = template_of()
    example = talk(user("12 + 7?"), assistant("19"), user("sure?"), assistant("yes"))
    (rollout,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=512, final_turn_only=True)).rollouts
    assert [turn.text for turn in rollout.turns] == ["yes"]
    assert rollout.prompt.tolist() == template.encode_prompt(example.messages[:3])


def test_what_follows_the_last_reply_is_left_out():
    example = talk(user("12 + 7?"), assistant("19"), user("thanks"))
    (rollout,) = demonstration_group(0, "data", example, template_of(), RULES).rollouts
    assert rollout.messages == example.messages[:2] and rollout.turns[-1].sampled


def test_earlier_reasoning_that_the_template_drops_is_taught_on_a_branch_unless_the_final_turn_alone_is():
    example = talk(user("12 + 7?"), assistant("<think>\nhm\n</think>\n\n19"), user("sure?"), assistant("yes"))
    template = template_of(QWEN3)
    (rollout,) = demonstration_group(0, "data", example, template, RULES).rollouts
    (branch,) = rollout.branches
    assert "hm" not in written(rollout, template) and [turn.text for turn in branch.turns] == ["<think>\nhm\n</think>\n\n19"]
    (rollout,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=512, final_turn_only=True)).rollouts
    assert "hm" not in written(rollout, template) and not rollout.branches


def test_a_pair_shares_its_prompt_and_its_rewards_say_which_is_better():
    template = template_of()
    group = preference_group(0, "data", pair(margin=2.0), template, RULES)
    chosen, rejected = group.rollouts
    assert chosen.prompt is rejected.prompt and chosen.prompt.tolist() == template.encode_prompt(PROMPT)
    assert (chosen.text, rejected.text, chosen.sample, rejected.sample) == ("19", "20", 0, 1)
    assert group.rewards.tolist() == [2.0, 0.0]
    assert preference_group(0, "data", pair(), template, RULES).rewards.tolist() == [1.0, 0.0]


def test_a_packed_pair_reads_its_prompt_once():
    group = preference_group(0, "data", pair("the answer is 19", "no"), template_of(), RULES)
    prompt, (chosen, rejected) = len(group.rollouts[0].prompt), group.rollouts
    batch = pack_grpo([group])
    assert len(batch.tokens) == prompt + chosen.sampled_tokens + rejected.sampled_tokens - 2
    assert batch.totals.tokens == chosen.sampled_tokens + rejected.sampled_tokens


def test_only_completions_are_taught_where_the_prompt_holds_replies():
    prompt = (user("12 + 7?"), assistant("19"), user("sure?"))
    template = template_of()
    chosen, rejected = preference_group(0, "data", pair("yes", "no", prompt=prompt), template, RULES).rollouts
    assert [turn.text for turn in chosen.turns] == ["yes"] and [turn.text for turn in rejected.turns] == ["no"]
    assert chosen.prompt.tolist() == template.encode_prompt(prompt)


def test_completions_of_several_turns_are_taught_turn_by_turn():
    long = (assistant("19"), user("sure?"), assistant("yes"))
    example = Preference(id="rows:0", prompt=PROMPT, chosen=long, rejected=(assistant("20"),))
    chosen, rejected = preference_group(0, "data", example, template_of(), RULES).rollouts
    assert [turn.sampled for turn in chosen.turns] == [True, False, True] and len(rejected.turns) == 1
    assert chosen.prompt is rejected.prompt and chosen.messages == (*PROMPT, *long)
    final = preference_group(0, "data", example, template_of(), RecordedRules(max_length=512, final_turn_only=True)).rollouts
    assert [[turn.text for turn in each.policy_turns] for each in final] == [["yes"], ["20"]]


@pytest.mark.parametrize(("desirable", "reward"), [(True, 1.0), (False, 0.0)])
def test_a_judged_completion_stands_beside_an_unrelated_one_after_the_same_prompt(desirable, reward):
    template = template_of()
    group = make_group(
        plan_unpaired_preference(0, "data", verdict("19", desirable=desirable), verdict("Paris", id="rows:9"), RULES),
        template,
        RULES,
    )
    own, unrelated = group.rollouts
    assert own.prompt is unrelated.prompt and (own.text, unrelated.text) == ("19", "Paris")
    assert group.rewards.tolist() == [reward, 0.0] and group.task.id == "rows:0"
    assert unrelated.task == own.task and unrelated.sample == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda template, rules: demonstration_group(0, "data", talk(*PROMPT, assistant("19")), template, rules),
        lambda template, rules: preference_group(0, "data", pair(), template, rules),
        lambda template, rules: make_group(
            plan_unpaired_preference(0, "data", verdict("19"), verdict("20"), rules), template, rules
        ),
    ],
)
def test_what_fits_exactly_is_kept_and_what_does_not_is_an_error_with_its_length(make):
    template = template_of()
    longest = max(rollout.length for rollout in make(template, RULES).rollouts)
    assert not make(template, RecordedRules(max_length=longest)).errors
    failed = error_of(make(template, RecordedRules(max_length=longest - 1)))
    assert f"it has {longest} tokens" in failed and f"at most {longest - 1} fit" in failed
    assert "'rows:0'" in failed and "policy.max_total_sequence_length" in failed


def test_whatever_a_template_raises_is_recorded():
    assert "System role not supported" in error_of(preference_group(0, "data", pair(), template_of(GEMMA), RULES))


def test_a_pair_with_one_side_too_long_is_dropped_whole():
    rules = RecordedRules(max_length=120)
    assert not preference_group(0, "data", pair(), template_of(), rules).errors
    assert "at most 120 fit" in error_of(preference_group(0, "data", pair(rejected="20 " * 100), template_of(), rules))


def test_a_prompt_without_tokens_is_an_error():
    with pytest.warns(UserWarning, match="no chat template"):
        template = ChatTemplate(without_template())
    assert "its prompt has no tokens" in error_of(
        demonstration_group(0, "data", talk(user(""), assistant("19")), template, RULES)
    )


def without_template():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    return tokenizer


def test_a_plain_conversation_ends_with_the_end_of_the_sequence():
    with pytest.warns(UserWarning, match="no chat template"):
        template = ChatTemplate(without_template())
    example = talk(user("1+1="), assistant("2"), user("2+2="), assistant("4"))
    (rollout,) = demonstration_group(0, "data", example, template, RULES).rollouts
    assert written(rollout, template) == "1+1=2\n2+2=\n4<|im_end|>"
    (bare,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=512, add_eos=False)).rollouts
    assert written(bare, template) == "1+1=2\n2+2=\n4"


def test_a_stop_token_is_added_only_where_the_template_ends_with_none():
    template = template_of(LLAMA3)
    eot, eos = template.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|im_end|>"])
    example = talk(*PROMPT, assistant("19"))

    def end(**options) -> list[int]:
        (rollout,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=512, **options)).rollouts
        return rollout.turns[-1].tokens.tolist()[-2:]

    assert end(stop_ids=(eos, eot))[-1] == eot and end(stop_ids=(eos, eot))[-2] not in (eos, eot)
    assert end() == [eot, eos]  # the tokenizer's own end of sequence is all that would stop this model
    assert end(add_eos=False)[-1] == eot


def test_a_stop_token_that_opens_the_next_turn_is_said_by_the_policy():
    template = template_of(GLM)
    asks, ends = template.tokenizer.convert_tokens_to_ids(["<|user|>", "<|im_end|>"])
    example = talk(user("a"), assistant("b"), user("c"), assistant("d"))
    (rollout,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=512, stop_ids=(ends, asks))).rollouts
    first, between, last = rollout.turns
    assert first.tokens.tolist()[-1] == asks and last.tokens.tolist()[-1] == ends
    assert asks not in between.tokens.tolist()
    assert written(rollout, template) == "<|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd<|im_end|>"


def test_without_any_stop_token_there_is_nothing_to_end_with():
    template = template_of()
    template.tokenizer.eos_token = None
    example = talk(user("a"), assistant("b"))
    assert "data.add_eos=false" in error_of(demonstration_group(0, "data", example, template, RULES))
    assert not demonstration_group(0, "data", example, template, RecordedRules(max_length=512, add_eos=False)).errors


@pytest.mark.parametrize("length", [1, 0, -5])
def test_rules_without_room_for_a_reply_are_an_error(length):
    with pytest.raises(ValueError, match="max_length is"):
        RecordedRules(max_length=length)


texts = st.text(st.sampled_from("the answer 12\n7."), min_size=1, max_size=12)


@given(
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4), name=st.sampled_from(sorted(FAMILIES)), final=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_a_rollout_joins_to_the_rendering_up_to_the_last_taught_token(turns, name, final):
    template = TEMPLATES[name]
    example = talk(*(message for question, answer in turns for message in (user(question), assistant(answer))))
    (rollout,) = demonstration_group(0, "data", example, template, RecordedRules(max_length=4096, final_turn_only=final)).rollouts
    dicts = [message.as_dict() for message in example.messages]
    whole = template.tokenizer.apply_chat_template(dicts, tokenize=False)
    end = FAMILIES[name].end.strip()
    up_to_end = whole[: whole.rindex(end) + len(end)]
    eos = template.tokenizer.eos_token
    assert written(rollout, template) == up_to_end + ("" if up_to_end.endswith(eos) else eos)
    assert len(rollout.policy_turns) == (1 if final else len(turns))


TEMPLATES = {name: template_of(family) for name, family in FAMILIES.items()}


SFT_TEMPLATE = (  # without a beginning of its own, and with what opens an answer in the message before
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + ' Answer:' }}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}{% endfor %}"
)


def encode_turns(tokenizer, messages, *, add_bos: bool, add_generation_prompt: bool) -> tuple[list[int], list[bool]]:
    """NeMo-RL's way to tokens: each message is what it adds to the rendered text, tokenized alone; assistant messages are trained on."""
    tokens: list[int] = []
    in_loss: list[bool] = []
    before = ""
    for index, message in enumerate(messages):
        text = tokenizer.apply_chat_template(
            [each.as_dict() for each in messages[: index + 1]],
            tokenize=False,
            add_generation_prompt=add_generation_prompt and message.role in ("user", "tool"),
        )
        common = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text)))
        chunk = text[common:]
        if index == 0 and add_bos and not chunk.startswith(tokenizer.bos_token):
            chunk = tokenizer.bos_token + chunk
        if index == len(messages) - 1 and not chunk.rstrip("\n").endswith(tokenizer.eos_token):
            chunk += tokenizer.eos_token
        ids = tokenizer(chunk, add_special_tokens=False)["input_ids"]
        tokens += ids
        in_loss += [message.role == "assistant"] * len(ids)
        before = text
    return tokens, in_loss


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "sft"])
def test_tokens_and_loss_are_those_of_nemo_rl_up_to_white_space_after_a_turn(
    name: str, add_bos: bool, add_generation_prompt: bool
) -> None:
    template = template_of(FAMILIES.get(name, CHATML))
    if name == "sft":
        template.tokenizer.chat_template = SFT_TEMPLATE
    rules = RecordedRules(max_length=512, add_bos=add_bos, add_generation_prompt=add_generation_prompt)
    for messages in ((user("12 + 7?"), assistant("19")), (user("Hi"), assistant("Hello."), user("2+2?"), assistant("4"))):
        (rollout,) = demonstration_group(0, "data", talk(*messages), template, rules).rollouts
        assert not rollout.error
        tokens, in_loss = rollout.prompt.tolist(), [False] * len(rollout.prompt)
        for turn in rollout.turns:
            tokens += turn.tokens.tolist()
            in_loss += [turn.author == "policy"] * len(turn.tokens)
        expected, expected_loss = encode_turns(
            template.tokenizer, messages, add_bos=add_bos, add_generation_prompt=add_generation_prompt
        )
        assert expected[: len(tokens)] == tokens and not template.tokenizer.decode(expected[len(tokens) :]).strip()
        differing = [index for index, pair in enumerate(zip(in_loss, expected_loss, strict=False)) if pair[0] != pair[1]]
        assert not template.tokenizer.decode([tokens[index] for index in differing]).strip()


def test_a_beginning_is_added_once_and_only_where_the_tokenizer_has_one() -> None:
    rules = RecordedRules(max_length=512, add_bos=True)
    for family, added in ((CHATML, 1), (LLAMA3, 0)):
        template = template_of(family)
        with_bos, without = (
            demonstration_group(0, "data", talk(user("1?"), assistant("2")), template, each).rollouts[0].prompt.tolist()
            for each in (rules, RULES)
        )
        assert with_bos == [template.tokenizer.bos_token_id] * added + without
        assert with_bos.count(template.tokenizer.bos_token_id) == 1
    template = template_of()
    template.tokenizer.bos_token = None
    (rollout,) = demonstration_group(0, "data", talk(user("1?"), assistant("2")), template, rules).rollouts
    assert rollout.prompt.tolist() == template.encode_prompt([user("1?")])
