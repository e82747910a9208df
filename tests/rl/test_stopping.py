"""A first signal asks to stop; the event loop's watchdog says who blocks it."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from forge_jax.rl.stopping import SIGNALS, stoppable, unless
from forge_jax.rl.watchdog import watching


def test_a_signal_asks_to_stop_and_a_second_one_is_as_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))

    async def test() -> None:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 10)
            assert not seen
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]

    try:
        asyncio.run(test())
    finally:
        signal.signal(signal.SIGTERM, before[0])
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("asked", ["before", "within", "never"])
def test_work_is_given_up_when_the_run_is_asked_to_stop(asked: str) -> None:
    async def test() -> Any:
        stop, ended = asyncio.Event(), []

        async def work() -> str:
            try:
                await asyncio.sleep(0)
                if asked == "within":
                    stop.set()
                    await asyncio.sleep(3600)
                return "done"
            finally:
                ended.append(True)

        if asked == "before":
            stop.set()
        found = await unless(stop, work())
        assert ended == [] if asked == "before" else [True]
        return found

    assert asyncio.run(test()) == ("done" if asked == "never" else None)


def test_the_watchdog_names_who_blocks_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def sleeps(seconds: float) -> None:
        time.sleep(seconds)

    async def test() -> int:
        async with watching(0.2) as watchdog:
            await asyncio.sleep(0.3)
            assert watchdog.blocked == 0
            await sleeps(0.5)
            await asyncio.sleep(0.2)
            await sleeps(0.5)
            return watchdog.blocked

    assert asyncio.run(test()) == 2, "once each"
    assert all("test_stopping.py" in text and "sleeps" in text for text in caplog.messages)
