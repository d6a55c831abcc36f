"""A paged key-value cache: a sequence uses as many pages as its tokens need, and sequences with a common beginning share pages."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.columns import Columns
from strop.generation.torch.kv_cache import INDEX_KEYS, CacheShape
from strop.generation.torch.mixer_states import States
from strop.models.recorded_columns import RecordedColumn


class PagePool:
    """Pages 0 to ``size`` - 1: the stack, held pages, and free ones."""

    def __init__(self, size: int, copy_page: Callable[[int, int], object]) -> None:
        """``copy_page(source, target)`` copies the contents of a page."""
        self.size = size
        self.copy_page = copy_page
        self.stack: list[PrefixNode | PagedSequence] = []  # owner of each page of the stack
        self.held: dict[int, PrefixNode | PagedSequence] = {}
        self.free = list(range(size))  # ascending

    def push(self, owner: PrefixNode | PagedSequence) -> int | None:
        """Push a page onto the stack and return its number; None if no page is free."""
        if not self.free:
            return None
        page = len(self.stack)
        if page in self.held:
            self._move_up(page)
        else:
            lowest = self.free.pop(0)
            assert lowest == page, f"page {page} is neither held nor free"
        self.stack.append(owner)
        return page

    def _move_up(self, page: int) -> None:
        target, owner = self.free.pop(), self.held.pop(page)
        self.copy_page(page, target)
        self.held[target] = owner
        owner.renumber_page(page, target)

    def pop(self, page: int) -> None:
        """Free a page of the stack; the last one moves into its place."""
        last = len(self.stack) - 1
        if page != last:
            self.copy_page(last, page)
            self.stack[page] = self.stack[last]
            self.stack[page].renumber_page(last, page)
        self.stack.pop()
        self.free.insert(0, last)

    def hold(self, owner: PrefixNode | PagedSequence) -> int | None:
        """Hold the highest free page and return its number; None if no page is free."""
        if not self.free:
            return None
        page = self.free.pop()
        self.held[page] = owner
        return page

    def release(self, page: int) -> None:
        """Free a held page."""
        del self.held[page]
        insort(self.free, page)


Tokens = tuple[int, ...]


@dataclass(eq=False)
class PrefixNode:
    """A page of keys and values that sequences may share."""

    tokens: Tokens  # at most a page
    parent: PrefixNode | None
    page: int = -1
    users: int = 0  # sequences that attend to the page
    ready: bool = False  # its keys and values are computed
    attached: bool = True  # still in the tree
    children: dict[int, list[PrefixNode]] = field(default_factory=dict)  # by their first token
    logits: dict[int, Tensor] = field(default_factory=dict)  # number of tokens of the node -> [V], logits after them
    states: dict[int, States] = field(default_factory=dict)  # number of tokens of the node -> states after them

    def renumber_page(self, old: int, new: int) -> None:
        self.page = new

    def find_child(self, tokens: Tokens) -> PrefixNode | None:
        """Return the child that holds exactly these tokens."""
        return next((node for node in self.children.get(tokens[0], ()) if node.tokens == tokens), None)


@dataclass(frozen=True)
class PrefixMatch:
    """The cached part of a prompt: full pages, and the beginning of one more."""

    nodes: list[PrefixNode]
    partial: PrefixNode | None = None
    count: int = 0  # tokens of ``partial``
    logits: Tensor | None = None  # [V], if the whole prompt is cached
    states: States = field(default_factory=dict)  # after the cached part

    def length(self, page: int) -> int:
        """Return the number of cached tokens."""
        return len(self.nodes) * page + self.count


def count_common(left: Tokens, right: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class PrefixTree:
    """Finds, keeps and evicts shared pages. The least recently used page is evicted first; pages in use by sequences stay.

    Of a model whose layers carry states, a sequence goes on only from where they are held, the least recently used first to go.
    """

    def __init__(self, pool: PagePool, page: int, most_states: int = 0) -> None:
        """``most_states``: places whose states are held; 0 for a model without states."""
        self.pool = pool
        self.page = page
        self.most_states = most_states
        self._with_states: OrderedDict[tuple[PrefixNode, int], None] = OrderedDict()  # least recently used first
        self.root = PrefixNode((), None, ready=True)
        self.epoch = 0  # number of times the tree was emptied
        self._recent: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest cached beginning of a prompt from which generation can continue: shorter than it, or with its
        logits.
        """
        if self.most_states:
            return self._match_states(tokens)
        node, nodes = self.root, list[PrefixNode]()
        while (child := self._find_full_child(node, tokens, len(nodes))) is not None:
            nodes.append(child)
            node = child
        rest = tokens[len(nodes) * self.page : (len(nodes) + 1) * self.page]
        if not rest:
            if self.page in node.logits:
                return PrefixMatch(nodes, logits=node.logits[self.page])
            return self._begin_of(nodes[:-1], node, self.page - 1)
        ready = [child for child in node.children.get(rest[0], ()) if child.ready]
        if not ready:
            return PrefixMatch(nodes)
        best = max(ready, key=lambda child: count_common(child.tokens, rest))
        count = count_common(best.tokens, rest)
        if len(nodes) * self.page + count == len(tokens):
            for child in ready:
                if count in child.logits and child.tokens[:count] == rest:
                    return PrefixMatch(nodes, child, count, child.logits[count])
            count -= 1
        return self._begin_of(nodes, best, count)

    def _match_states(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest one after which states are held."""
        node, nodes, found = self.root, list[PrefixNode](), PrefixMatch([])
        while rest := tokens[len(nodes) * self.page : (len(nodes) + 1) * self.page]:
            held = [
                (count, child)
                for child in node.children.get(rest[0], ())
                for count in child.states
                if child.tokens[:count] == rest[:count]
                and (len(nodes) * self.page + count < len(tokens) or count in child.logits)
            ]
            if held:
                count, child = max(held, key=lambda each: each[0])
                self._with_states.move_to_end((child, count))
                logits = child.logits.get(count) if len(nodes) * self.page + count == len(tokens) else None
                whole = count == self.page
                found = PrefixMatch(
                    [*nodes, *([child] if whole else [])],
                    None if whole else child,
                    0 if whole else count,
                    logits,
                    child.states[count],
                )
            following = self._find_full_child(node, tokens, len(nodes))
            if following is None:
                break
            nodes.append(following)
            node = following
        return found

    def hold_states(self, node: PrefixNode, count: int, states: States) -> None:
        """Hold the states after the first ``count`` tokens of a node."""
        node.states[count] = states
        self._with_states[node, count] = None
        self._with_states.move_to_end((node, count))
        if len(self._with_states) > self.most_states:
            (oldest, place), _ = self._with_states.popitem(last=False)
            del oldest.states[place]

    def _find_full_child(self, node: PrefixNode, tokens: Tokens, depth: int) -> PrefixNode | None:
        chunk = tokens[depth * self.page : (depth + 1) * self.page]
        return node.find_child(chunk) if len(chunk) == self.page else None

    @staticmethod
    def _begin_of(nodes: list[PrefixNode], partial: PrefixNode, count: int) -> PrefixMatch:
        return PrefixMatch(nodes, partial, count) if count > 0 and partial.ready else PrefixMatch(nodes)

    def insert(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """Add a node with its own page; None if no page is free."""
        node = PrefixNode(tokens, parent)
        page = self.pool.hold(node)
        if page is None:
            return None
        node.page = page
        parent.children.setdefault(tokens[0], []).append(node)
        self._recent[node] = None
        return node

    def acquire(self, node: PrefixNode) -> None:
        """Keep a node's page until it is released."""
        node.users += 1

    def give_up(self, node: PrefixNode) -> None:
        node.users -= 1
        assert node.users >= 0
        if not node.attached and not node.users:
            self.pool.release(node.page)

    def touch(self, nodes: list[PrefixNode]) -> None:
        """Mark the nodes of one path as just used. Parents count as newer than their children, which are evicted first."""
        for node in reversed(nodes):
            if node.attached:
                self._recent.move_to_end(node)

    def evict(self) -> bool:
        """Drop the least recently used node that is not in use, and free its page. Return whether there was one."""
        for node in self._recent:
            if not node.users and not node.children:
                self.drop(node)
                return True
        return False

    def drop(self, node: PrefixNode) -> None:
        """Remove a leaf node from the tree. Its page is freed once no sequence uses it."""
        assert not node.children and node.parent is not None
        siblings = node.parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del node.parent.children[node.tokens[0]]
        self._detach(node)

    def clear(self) -> None:
        """Empty the tree after the weights changed. Pages in use are freed once their sequences release them."""
        for node in list(self._recent):
            self._detach(node)
        self.root.children.clear()
        self.epoch += 1

    def _detach(self, node: PrefixNode) -> None:
        del self._recent[node]
        node.attached = False
        node.logits.clear()
        for count in node.states:
            del self._with_states[node, count]
        node.states.clear()
        if not node.users:
            self.pool.release(node.page)


PAGE_SIZES = (256, 128, 64, 32, 16)


@dataclass(eq=False)
class PagedSequence:
    """The pages of a sequence: shared ones, then its own."""

    epoch: int  # of the tree when it was read
    nodes: list[PrefixNode] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self.nodes] + self.own

    def renumber_page(self, old: int, new: int) -> None:
        self.own[self.own.index(old)] = new


@dataclass(frozen=True, eq=False)
class OpenedSequence:
    """A sequence with pages for a prompt, of which ``cached`` tokens are already read."""

    sequence: PagedSequence
    cached: int
    logits: Tensor | None = None  # [V], if all tokens are read
    states: States = field(default_factory=dict)  # after the tokens that are read


def choose_page(capacity: int, length: int, sequences: int) -> int | None:
    """Return the largest page size with two pages for each of ``sequences``, or the smallest size; None if ``length`` tokens do
    not fit.

    ``capacity`` is in tokens. Large pages need fewer and larger operators; small ones waste less of their last page.
    """
    fitting = [page for page in PAGE_SIZES if capacity // page >= -(-length // page)]
    roomy = [page for page in fitting if capacity // page >= 2 * sequences]
    return roomy[0] if roomy else fitting[-1] if fitting else None


def split_memory(shape: CacheShape, capacity: int, sequences: int) -> tuple[int, int]:
    """Return how many sequences can run, at most ``sequences``, and the tokens for pages that fit next to their states and those
    of as many stored prefixes. States take at most half of the memory, unless one sequence needs more.
    """
    if shape.states:
        sequences = min(sequences, max(1, capacity // (4 * shape.state_tokens)))
    return sequences, capacity - 2 * sequences * shape.state_tokens


class PagedCache:
    """Keys and values [layers, pages, heads, page, D], and the assignment of pages."""

    def __init__(
        self, shape: CacheShape, pages: int, page: int, recorded: Sequence[RecordedColumn] = (), prefixes: int = 1
    ) -> None:
        """``recorded``: columns of tokens that are held too; ``prefixes``: whose states are held, of a model that has states."""
        self.shape = shape
        self.page = page  # tokens
        size = (shape.layers, pages, shape.heads, page)
        # Uninitialized: a page is zeroed on its first use and takes memory only then.
        self.keys = torch.empty((*size, shape.head_size), dtype=shape.dtype, device=shape.device)
        self.values = torch.empty((*size, shape.value_size), dtype=shape.dtype, device=shape.device)
        self.columns = shape.allocate_columns(recorded, (pages, page))  # [pages, page, ...]
        self.states: Tensor | None = None  # [pages, page, H], fused for a drafter
        if shape.state_size:
            self.states = torch.zeros((pages, page, shape.state_size), dtype=torch.float32, device=shape.device)
        self.pool = PagePool(pages, self.copy_page)
        self.tree = PrefixTree(self.pool, page, prefixes if shape.states else 0)
        self._used = [False] * pages

    def copy_page(self, source: int, target: int, length: int | None = None) -> None:
        """Copy the first ``length`` tokens of a page (None: all)."""
        self._prepare(target)
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        for held in self.columns.values():
            held[target, :length] = held[source, :length]
        if self.states is not None:
            self.states[target, :length] = self.states[source, :length]

    def _prepare(self, page: int) -> None:
        """Zero a page on its first use, because masked attention multiplies unwritten values by zero."""
        if not self._used[page]:
            self.keys[:, page].zero_()
            self.values[:, page].zero_()
            self._used[page] = True

    def _push(self, sequence: PagedSequence) -> bool:
        while (page := self.pool.push(sequence)) is None:
            if not self.tree.evict():
                return False
        self._prepare(page)
        sequence.own.append(page)
        return True

    def _insert(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """Add a node to the tree and acquire it; the caller must release it. None if there is no page for it."""
        self.tree.acquire(parent)  # keeps it from being evicted for its own child
        while (node := self.tree.insert(parent, tokens)) is None:
            if not self.tree.evict():
                break
        self.tree.give_up(parent)
        if node is not None:
            self._prepare(node.page)
            self.tree.acquire(node)
        return node

    def open(self, tokens: Tokens) -> OpenedSequence | None:
        """Open a sequence with pages for a prompt: cached ones, new shared ones, and an own page for its last tokens.

        Returns None, changing at most the cache, if memory is too short.
        """
        match = self.tree.match(tokens)
        sequence = PagedSequence(self.tree.epoch, list(match.nodes))
        for node in (*match.nodes, *([match.partial] if match.partial else [])):
            self.tree.acquire(node)
        complete = self._add_pages(sequence, tokens)
        if complete and match.partial is not None:
            self.copy_page(match.partial.page, sequence.pages[len(match.nodes)], match.count)
        self.tree.touch([*match.nodes, *([match.partial] if match.partial else [])])
        if match.partial is not None:
            self.tree.give_up(match.partial)
        if not complete:
            self._forget(sequence, match)
            return None
        return OpenedSequence(sequence, match.length(self.page), match.logits, match.states)

    def open_beside(self, sibling: PagedSequence, length: int) -> PagedSequence | None:
        """Open a sequence that shares the pages of another one with the same prompt. The tokens of its own page must still be
        copied.
        """
        sequence = PagedSequence(sibling.epoch, list(sibling.nodes))
        for node in sequence.nodes:
            self.tree.acquire(node)
        if self.extend(sequence, length):
            return sequence
        self.close(sequence)
        return None

    def _add_pages(self, sequence: PagedSequence, tokens: Tokens) -> bool:
        """Add shared pages for the full pages of a prompt, and an own page for the rest."""
        for index in range(len(sequence.nodes), len(tokens) // self.page):
            parent = sequence.nodes[-1] if sequence.nodes else self.tree.root
            chunk = tokens[index * self.page : (index + 1) * self.page]
            if parent.find_child(chunk) is not None:
                break  # the page is cached without logits or states: it is read again, from some token on, into an own page
            node = self._insert(parent, chunk)
            if node is None:
                return False
            sequence.nodes.append(node)
        return self.extend(sequence, len(tokens))

    def _forget(self, sequence: PagedSequence, match: PrefixMatch) -> None:
        """Close a sequence that was not read, and drop the nodes created for it."""
        made = sequence.nodes[len(match.nodes) :]
        self.close(sequence)
        for node in reversed(made):
            self.tree.drop(node)

    def extend(self, sequence: PagedSequence, length: int) -> bool:
        """Give a sequence room for ``length`` tokens, evicting unused pages. Return whether there was room."""
        while (len(sequence.nodes) + len(sequence.own)) * self.page < length:
            if not self._push(sequence):
                return False
        return True

    def close(self, sequence: PagedSequence) -> None:
        """Free the pages of a sequence; shared ones stay cached."""
        for page in sorted(sequence.own, reverse=True):
            self.pool.pop(page)
        for node in sequence.nodes:
            self.tree.give_up(node)
        self.tree.touch(sequence.nodes)
        sequence.own.clear()
        sequence.nodes.clear()

    def store(self, sequence: PagedSequence, tokens: Tokens, logits: Tensor | None = None, states: States | None = None) -> None:
        """Keep the keys and values of a sequence's first tokens, memory permitting. ``logits`` [V] and ``states``: after the last.

        Results of earlier weights are not kept.
        """
        if sequence.epoch != self.tree.epoch:
            return
        parent, kept = self.tree.root, list[PrefixNode]()
        for index in range(-(-len(tokens) // self.page)):
            chunk = tokens[index * self.page : (index + 1) * self.page]
            node = sequence.nodes[index] if index < len(sequence.nodes) else parent.find_child(chunk)
            if node is not None:
                self.tree.acquire(node)
            else:
                node = self._insert(parent, chunk)
                if node is None:
                    break
                self.copy_page(sequence.pages[index], node.page, len(chunk))
            node.ready = True
            kept.append(node)
            parent = node
        else:
            if logits is not None and parent.attached:
                parent.logits[len(parent.tokens)] = logits
            if states and parent.attached:
                self.tree.hold_states(parent, len(parent.tokens), states)
        for node in kept:
            self.tree.give_up(node)
        self.tree.touch(kept)

    def read_states(self, sequence: PagedSequence, first: int, last: int) -> Tensor:
        """Return the fused states of a sequence's tokens at positions [first, last), [last - first, H]."""
        assert self.states is not None
        positions = torch.arange(first, last)
        pages = torch.tensor(sequence.pages)[positions // self.page]
        return self.states[pages.to(self.states.device), (positions % self.page).to(self.states.device)]

    def read_columns(self, sequence: PagedSequence, length: int) -> Columns:
        """Return what was recorded of a sequence's first tokens, [length, ...] each, on the CPU."""
        if not self.columns:
            return {}
        pages = torch.tensor(sequence.pages, device=self.shape.device)
        return {
            column: column.cut(held.index_select(0, pages).flatten(0, 1)[:length], length).to("cpu", copy=True)
            for column, held in self.columns.items()
            if column is not INDEX_KEYS
        }
