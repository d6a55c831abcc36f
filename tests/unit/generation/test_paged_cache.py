"""Pages are never lost or given out twice, whatever sequences do; attention over them is attention over the sequence."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.generation.torch.kv_cache import CacheShape
from strop.generation.torch.paged.page_attention import PagedDecodePlan, make_layout
from strop.generation.torch.paged.paged_cache import PAGE_SIZES, PagedCache, PagedSequence, PrefixNode, choose_page
from strop.models.attention.attention_plan import AttentionSpec, causal_mask, masked_attention

PAGE = 4


def make_cache(pages: int, *, page: int = PAGE, heads: int = 1, size: int = 1, dtype: torch.dtype = torch.float64) -> PagedCache:
    shape = CacheShape(layers=1, heads=heads, head_size=size, value_size=size, dtype=dtype, device=torch.device("cpu"))
    return PagedCache(shape, pages, page)


def nodes_of(cache: PagedCache) -> list[PrefixNode]:
    found, stack = [], [cache.tree.root]
    while stack:
        for children in stack.pop().children.values():
            found += children
            stack += children
    return found


def check_pages(cache: PagedCache, sequences: list[PagedSequence]) -> None:
    """Every page has one owner or is free, the stack has no gaps, and users are counted."""
    pool = cache.pool
    own = [page for sequence in sequences for page in sequence.own]
    assert sorted(own) == list(range(len(pool.stack)))
    assert all(pool.stack[page] is sequence for sequence in sequences for page in sequence.own)
    used = Counter(node for sequence in sequences for node in sequence.nodes)
    nodes = set(nodes_of(cache)) | set(used)
    assert {node.page for node in nodes} == set(pool.held) and len(nodes) == len(pool.held)
    assert all(pool.held[node.page] is node and node.users == used[node] for node in nodes)
    assert sorted([*own, *pool.held, *pool.free]) == list(range(pool.size))
    assert len(cache.tree) == len(nodes_of(cache))


def fill(cache: PagedCache, sequence: PagedSequence, tokens: tuple[int, ...], start: int) -> None:
    """Write what depends on a token and all before it, as keys and values do."""
    for position in range(start, len(tokens)):
        mark = float(hash(tokens[: position + 1]) % 10007)
        cache.keys[:, sequence.pages[position // PAGE], :, position % PAGE] = mark
        cache.values[:, sequence.pages[position // PAGE], :, position % PAGE] = -mark


def check_contents(cache: PagedCache, sequence: PagedSequence, tokens: tuple[int, ...]) -> None:
    for position in range(len(tokens)):
        mark = float(hash(tokens[: position + 1]) % 10007)
        assert float(cache.keys[0, sequence.pages[position // PAGE], 0, position % PAGE]) == mark, (tokens, position)
        assert float(cache.values[0, sequence.pages[position // PAGE], 0, position % PAGE]) == -mark


_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), _tokens),
        st.tuples(st.just("grow"), st.integers(0, 9)),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("store"), st.integers(0, 9)),
        st.tuples(st.just("clear"), st.just(None)),
    ),
    max_size=40,
)


def open_and_read(cache: PagedCache, tokens: tuple[int, ...]) -> PagedSequence | None:
    opened = cache.open(tokens)
    if opened is None:
        return None
    assert opened.cached < len(tokens) or opened.logits is not None
    fill(cache, opened.sequence, tokens, opened.cached)
    if opened.logits is None:
        cache.store(opened.sequence, tokens, torch.tensor([float(hash(tokens))]))
    else:
        assert float(opened.logits[0]) == float(torch.tensor(float(hash(tokens)))), "the logits are those after this prompt"
    return opened.sequence


@settings(max_examples=250, deadline=None, derandomize=True)
@given(pages=st.integers(1, 12), steps=_steps)
def test_no_page_is_lost_or_used_twice_and_each_holds_what_its_sequence_wrote(pages: int, steps: list[tuple[str, Any]]) -> None:
    cache = make_cache(pages)
    running: list[tuple[PagedSequence, tuple[int, ...]]] = []
    for kind, argument in steps:
        if kind == "open":
            before = len(running)
            if (sequence := open_and_read(cache, argument)) is not None:
                running.append((sequence, argument))
            assert len(running) > before or before or len(argument) > pages * PAGE, "alone, a sequence that fits is never refused"
        elif kind == "clear":
            cache.tree.clear()
        elif running:
            index = argument % len(running)
            sequence, tokens = running[index]
            match kind:
                case "grow":
                    longer = (*tokens, 1)
                    if cache.extend(sequence, len(longer)):
                        fill(cache, sequence, longer, len(tokens))
                        running[index] = (sequence, longer)
                case "store":
                    cache.store(sequence, tokens)
                case _:
                    cache.close(sequence)
                    del running[index]
        check_pages(cache, [sequence for sequence, _ in running])
        for sequence, tokens in running:
            check_contents(cache, sequence, tokens)
    for sequence, _ in running:
        cache.close(sequence)
    cache.tree.clear()
    assert cache.pool.free == list(range(pages))


def test_prompts_that_begin_alike_share_the_pages_of_their_beginning() -> None:
    cache = make_cache(20)
    system = tuple(range(9))
    first, second = open_and_read(cache, (*system, 50, 51)), open_and_read(cache, (*system, 60))
    assert first is not None and second is not None
    assert first.nodes == second.nodes and len(first.nodes) == 2
    assert cache.tree.match((*system, 70, 71)).length(PAGE) == 9, "of the third page, the token they have in common"


def test_the_page_used_longest_ago_is_evicted_first_and_one_in_use_never() -> None:
    cache = make_cache(4)
    kept = open_and_read(cache, (1, 1, 1, 1))
    for prompt in ((2, 2, 2, 2), (3, 3, 3, 3)):
        sequence = open_and_read(cache, prompt)
        assert sequence is not None
        cache.close(sequence)
    assert cache.tree.match((2, 2, 2, 2, 9)).count + len(cache.tree.match((2, 2, 2, 2, 9)).nodes) > 0  # looking is not using
    again = open_and_read(cache, (2, 2, 2, 2))
    assert again is not None
    cache.close(again)
    for prompt in ((4, 4, 4, 4), (5, 5, 5, 5)):
        sequence = open_and_read(cache, prompt)
        assert sequence is not None
        cache.close(sequence)
    assert kept is not None
    found = {prompt: len(cache.tree.match((*prompt, 9)).nodes) for prompt in ((1,) * 4, (2,) * 4, (3,) * 4, (4,) * 4, (5,) * 4)}
    assert found == {(1,) * 4: 1, (2,) * 4: 1, (3,) * 4: 0, (4,) * 4: 1, (5,) * 4: 1}


def test_pages_are_smaller_where_memory_is_short() -> None:
    assert choose_page(100_000, 4096, 64) == PAGE_SIZES[0]
    assert choose_page(16_000, 512, 64) == 64, "two pages for each of 64 sequences"
    assert choose_page(48, 48, 4) == 16
    assert choose_page(47, 48, 4) is None


def gather(cache: PagedCache, sequence: PagedSequence, length: int, tensor: Tensor) -> Tensor:  # [heads, length, D]
    return tensor[0, torch.tensor(sequence.pages)].transpose(0, 1).flatten(1, 2)[:, :length]


@pytest.mark.parametrize("window", [None, 3, 11])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_over_pages_is_attention_over_the_sequence(
    window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Random sequences that share pages with each other, with one or several new tokens each, after others have come and gone."""
    heads, size = 2, 8
    for seed in range(12):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        cache = make_cache(60, heads=heads, size=size, dtype=dtype)
        running, lengths = make_sequences(cache, rng)
        cache.keys.copy_(torch.randn(cache.keys.shape, dtype=dtype))
        cache.values.copy_(torch.randn(cache.values.shape, dtype=dtype))
        widths = [1 if seed % 3 == 0 else rng.randrange(1, 4) for _ in running]
        for sequence, length, width in zip(running, lengths, widths, strict=True):
            assert cache.extend(sequence, length + width)
        where = [
            (sequence, length + step)
            for sequence, length, width in zip(running, lengths, widths, strict=True)
            for step in range(width)
        ]
        pages = torch.tensor([sequence.pages[position // PAGE] for sequence, position in where])
        positions = torch.tensor([position for _, position in where])
        plan = PagedDecodePlan(cache, make_layout(cache, running, widths), pages, positions, int(positions.max()) + 1)
        query = torch.randn(len(where), 3 * heads, size, dtype=dtype)
        key, value = (torch.randn(len(where), heads, size, dtype=dtype) for _ in range(2))
        spec = AttentionSpec(0, 0.3, window, softcap, torch.randn(3 * heads, dtype=dtype) if seed % 4 == 1 else None)
        found = plan.attend(query, key, value, spec)
        first = 0
        for sequence, length, width in zip(running, lengths, widths, strict=True):
            keys, values = (gather(cache, sequence, length + width, tensor)[None] for tensor in (cache.keys, cache.values))
            assert torch.equal(keys[0, :, length:].transpose(0, 1), key[first : first + width]), "the new keys are written"
            queries = query[first : first + width].transpose(0, 1)[None]
            mask = causal_mask(width, length + width, window, query.device)
            wanted = masked_attention(queries, keys, values, mask, spec)[0].transpose(0, 1)
            torch.testing.assert_close(
                found[first : first + width], wanted, atol=1e-5 if dtype == torch.float32 else 1e-12, rtol=0
            )
            first += width


def make_sequences(cache: PagedCache, rng: random.Random) -> tuple[list[PagedSequence], list[int]]:
    """Some sequences on a few prompts, of which a part was closed again."""
    prompts = [tuple(rng.randrange(3) for _ in range(rng.choice((2, 5, 12, 17)))) for _ in range(3)]
    running, lengths = [], []
    for _ in range(rng.randrange(2, 9)):
        prompt = rng.choice(prompts)
        opened = cache.open(prompt)
        assert opened is not None
        if opened.logits is None:
            cache.store(opened.sequence, prompt, torch.zeros(1))
        running.append(opened.sequence)
        lengths.append(len(prompt) + rng.randrange(0, 3))
        assert cache.extend(opened.sequence, lengths[-1])
    if len(running) > 2:
        cache.close(running.pop(0))
        lengths.pop(0)
    return running, lengths


@pytest.mark.parametrize("state_size", [0, 6])
def test_the_bytes_of_a_token_are_those_that_a_cache_holds_for_it(state_size: int) -> None:
    shape = CacheShape(
        layers=3, heads=2, head_size=5, value_size=3, dtype=torch.bfloat16, device=torch.device("cpu"), state_size=state_size
    )
    cache = PagedCache(shape, 7, PAGE)
    held = [cache.keys, cache.values, *([] if cache.states is None else [cache.states])]
    assert shape.bytes_per_token * 7 * PAGE == sum(each.nbytes for each in held)
