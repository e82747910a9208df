"""An engine that fails serves again, what it broke is played again, and at last it is given up."""

import asyncio

import pytest

from forge_jax import restarts
from forge_jax.restarts import TRIES
from forge_jax.rl.health import Health, supervised


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT", 0.01)


class Engine:
    """Fails so many times, each time that `calls` callers are at it."""

    def __init__(self, faults: int, calls: int):
        self.faults, self.calls = faults, calls
        self.ended: asyncio.Event = asyncio.Event()
        self.waiting = 0

    async def serve(self) -> None:
        self.ended = asyncio.Event()
        self.waiting = 0
        while self.faults:
            if self.waiting == self.calls:
                self.faults -= 1
                self.ended.set()
                raise RuntimeError("the device is gone")
            await asyncio.sleep(0)
        await asyncio.sleep(3600)

    async def play(self) -> bool:
        """False where the engine broke it."""
        if not self.faults:
            return True
        self.waiting += 1
        await self.ended.wait()
        return False


@pytest.mark.parametrize("faults", range(TRIES))
def test_what_an_engine_broke_is_played_again(
    faults: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> tuple[list[bool], int]:
        engine, state = Engine(faults, 3), Health()
        serving = asyncio.create_task(supervised(engine.serve, state))
        found = await asyncio.gather(*(state.unbroken(engine.play) for _ in range(3)))
        serving.cancel()
        return found, state.failures

    assert asyncio.run(asyncio.wait_for(test(), 60)) == ([True] * 3, faults)
    assert sum("the engine failed" in text for text in caplog.messages) == faults


def test_an_engine_that_goes_on_failing_is_given_up_and_nothing_is_taken_from_it() -> None:
    async def test() -> None:
        engine, state = Engine(1000, 1), Health()
        playing = asyncio.create_task(state.unbroken(engine.play))
        with pytest.raises(RuntimeError, match="the device is gone"):
            await supervised(engine.serve, state)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not playing.done()
        assert state.failures == TRIES
        playing.cancel()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_fault_after_long_service_is_the_first_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STEADY_SECONDS", -1.0)  # any service is long
    faults = iter([RuntimeError("now and then")] * 3 * TRIES)

    async def serve() -> None:
        fault = next(faults, None)
        if fault is None:
            await asyncio.sleep(3600)
        else:
            raise fault

    async def test() -> int:
        state = Health()
        serving = asyncio.create_task(supervised(serve, state))
        while state.failures < 3 * TRIES:
            await asyncio.sleep(0.01)
        serving.cancel()
        return state.failures

    assert asyncio.run(test()) == 3 * TRIES
