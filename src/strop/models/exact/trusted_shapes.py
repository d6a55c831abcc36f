"""Which shapes of a product give the bits of the reference shape, found by comparison on this machine.

The reference is a product of 16 rows. Whether a product of more or fewer rows adds in the same order is known only to its library (MKL,
oneDNN, cuBLAS), so each shape is tried once: rows of random numbers, of which the reference is known, are laid in random order over all
places of the shape. Were the additions in another order, a large part of the results would differ in their last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.exact.exactness_error import NotExactError

log = logging.getLogger(__name__)

REFERENCE_ROWS = 16
TRIED_ROWS = 64  # different rows of a trial

RowFunction = Callable[[Tensor], Tensor]  # [.., rows, K] -> [.., rows, N]


@dataclass(frozen=True)
class ProductKind:
    """What, besides its rows, may decide how a product is computed."""

    name: str
    inputs: int  # K, numbers of a row
    outputs: int  # N
    dtype: torch.dtype
    device: torch.device
    details: Hashable = None


@dataclass(frozen=True, eq=False)
class _Reference:
    rows: Tensor  # [TRIED_ROWS, K]
    results: Tensor  # [TRIED_ROWS, N]


class TrustedShapes:
    """Remembers which shapes of which products have the reference's bits. There is one for all models of a process."""

    def __init__(self) -> None:
        self._references: dict[Hashable, _Reference] = {}
        self._trusted: dict[Hashable, bool] = {}

    def trusts(self, kind: ProductKind, shape: tuple[int, ...], make_product: Callable[[], RowFunction]) -> bool:
        """Return whether a call with rows of ``shape`` (the last is the number of rows) has the reference's bits at every place.

        ``make_product`` returns the product with weights that are always the same and without zeros. Raises NotExactError if even the
        reference depends on a row's place.
        """
        key = (kind, torch.get_num_threads())
        known = self._trusted.get((key, shape))
        if known is None:
            known = self._trusted[key, shape] = self._try(key, kind, shape, make_product())
        return known

    @torch.no_grad()
    def _try(self, key: Hashable, kind: ProductKind, shape: tuple[int, ...], product: RowFunction) -> bool:
        if key not in self._references:
            self._references[key] = _compute_reference(kind, product, len(shape))
        reference, places = self._references[key], torch.Size(shape).numel()
        generator = torch.Generator().manual_seed(places)
        for _ in range(-(-TRIED_ROWS // places)):
            chosen = torch.randint(TRIED_ROWS, (places,), generator=generator).to(kind.device)
            results = product(reference.rows[chosen].view(*shape, -1))
            if not torch.equal(results.flatten(0, -2), reference.results[chosen]):
                log.info("exact: %s with rows of %s differs from its reference shape, which is used instead", kind, shape)
                return False
        return True


def _compute_reference(kind: ProductKind, product: RowFunction, dims: int) -> _Reference:
    generator = torch.Generator().manual_seed(kind.inputs)
    rows = torch.randn(TRIED_ROWS, kind.inputs, generator=generator).to(kind.device, kind.dtype)
    results = in_reference_blocks(product, rows, dims)
    moved = in_reference_blocks(product, rows.roll(5, 0), dims).roll(-5, 0)
    if not torch.equal(results, moved):
        raise NotExactError(
            f"policy.exact_on_policy: a product of {REFERENCE_ROWS} rows ({kind}) gives a row other bits at another place on this machine, "
            "so nothing can be exact here; set it to false, or try policy.num_threads=1"
        )
    return _Reference(rows, results)


def in_reference_blocks(product: RowFunction, rows: Tensor, dims: int) -> Tensor:
    """Return the product of rows [n, K], computed in blocks of the reference shape, which has ``dims`` - 1 leading dimensions of one."""
    blocks = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % REFERENCE_ROWS)).split(REFERENCE_ROWS)
    results = [product(block.view(*[1] * (dims - 1), *block.shape)) for block in blocks]
    return torch.cat([result.flatten(0, -2) for result in results])[: len(rows)]


def round_up_rows(rows: int) -> int:
    """Return the number of rows that ``rows`` are padded to: few shapes, so that few are tried."""
    step = 8 if rows <= 64 else 64
    return -(-rows // step) * step


SHAPES = TrustedShapes()
