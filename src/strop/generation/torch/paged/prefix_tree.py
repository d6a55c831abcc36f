"""The pages that were read, as a tree: a node is a page, and its path from the root spells the tokens up to the page's end.

Prompts and conversations share the nodes of their common beginning. A node that is not full is the end of a prompt or a
conversation; others copy the common part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from strop.generation.torch.paged.page_pool import PagePool

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
    """Finds, keeps and evicts shared pages. The least recently used page is evicted first; pages in use by sequences stay."""

    def __init__(self, pool: PagePool, page: int) -> None:
        self.pool = pool
        self.page = page
        self.root = PrefixNode((), None, ready=True)
        self.epoch = 0  # number of times the tree was emptied
        self._recent: OrderedDict[PrefixNode, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, tokens: Tokens) -> PrefixMatch:
        """Return the longest cached beginning of a prompt from which generation can continue: shorter than it, or with its
        logits.
        """
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
        if not node.users:
            self.pool.release(node.page)
