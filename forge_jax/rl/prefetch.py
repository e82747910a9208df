"""What the next piece of work needs is made while the device works on this one.

Items go in; what a function makes of each comes out, in order. At most one result is made
ahead of its use, so that memory stays bounded.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def prefetch(make: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """``make(item)`` of each item, the next one on a thread meanwhile.

    `items` are drawn on the caller's thread, one ahead. What `make` raises is raised where
    its result would have come; nothing is made after that, nor once the caller stops asking.
    """
    with ThreadPoolExecutor(1, "prefetch") as worker:
        ahead: Future[B] | None = None
        for item in items:
            now, ahead = ahead, worker.submit(make, item)
            if now is not None:
                try:
                    result = now.result()
                except BaseException:
                    ahead.cancel()
                    raise
                yield result
        if ahead is not None:
            yield ahead.result()
