"""Which pages of the pool are free.

Counts flow in, page numbers flow out. Invariant: a page is free or was taken by one owner, who
gives it back once; the scratch page is nobody's.
"""

from collections.abc import Iterable

from forge_jax.rollout.packets import SCRATCH


class PagePool:
    """Owns the numbers of all pages of a place but its scratch page."""

    def __init__(self, size: int, place: int = 0):
        """`size` counts the scratch page, which is the first of the place."""
        self.total, first = size - 1, place * size
        self._free = [first + page for page in reversed(range(size)) if page != SCRATCH]
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many free pages; there must be as many."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back from their owner."""
        for page in pages:
            assert page in self._taken, f"page {page} was not taken"
            self._taken.remove(page)
            self._free.append(page)
