"""When a page is worth fetching: the moment that moving it beats computing it.

Seconds that fetches took flow in; whether the next one pays flows out. Moving m tokens takes
latency + m * moving, computing them m * prefill: fetching pays from
m > latency / (prefill - moving) on, and never where moving one takes as long as computing it.
"""

import threading

NEW_SHARE = 0.2  # of the newest measurement in a running mean


class FetchCost:
    """Running means of one store, beside the prefill speed of one engine."""

    def __init__(self, latency: float, prefill: float):
        """`latency` is that of a first measurement in seconds; `prefill` the seconds that
        computing a token takes, infinity where any fetch is to pay."""
        self.latency = latency
        self.moving = 0.0  # seconds a token more takes
        self.prefill = prefill
        self._lock = threading.Lock()

    def observe(self, first: float, rest: float, tokens: int) -> None:
        """A fetch had its first page after `first` seconds and `tokens` more `rest` later."""
        with self._lock:
            self.latency += NEW_SHARE * (first - self.latency)
            if tokens:
                self.moving += NEW_SHARE * (rest / tokens - self.moving)

    def seconds(self, tokens: int) -> float:
        """What fetching so many tokens takes."""
        return self.latency + self.moving * tokens

    def pays(self, tokens: int) -> bool:
        """Fetching so many tokens is faster than computing them."""
        return tokens * (self.prefill - self.moving) > self.latency
