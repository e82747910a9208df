"""Runs episodes of a function as forks of a process that has imported it already, a nursery.

An agent's libraries can take seconds to import, far longer than an episode; a fork takes some
milliseconds. Every episode still is a process of its own, with environment, folder, limits and
outputs of its own, and all it started dies with it. What is given up are walls between episodes
that run at the same time: the sandbox is around the nursery, so one of them could find and kill
the processes of another, or read its folder.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from forge_jax.agents.black_box_folder import episode_folder
from forge_jax.agents.faults import EnvironmentFault
from forge_jax.agents.process import Ended, How, Launch, LocalProcesses, order, read
from forge_jax.agents.sandbox import Sandbox
from forge_jax.programs import LimitConfig, ProgramConfig

OURS = 4  # processes of an episode that are not the agent's, and some that are ending
LOOK_SECONDS = 0.02  # how often a nursery is looked for until it is there
OPEN = Sandbox(kind="none")  # no further walls: the nursery has them
Address = tuple[str, int]


class ForkedProcesses:
    """So many episodes at once of the function of `cfg`, all within one `sandbox`.

    Belongs to the event loop that first uses it, and so do its nurseries: they end with it.
    """

    def __init__(self, cfg: ProgramConfig, sandbox: Sandbox):
        self._cfg = cfg
        self._sandbox = sandbox
        self._places = asyncio.Semaphore(cfg.places)
        self._newest: dict[Address, Nursery] = {}  # by the gateway that they reach
        self._by_folder: dict[Path, Nursery] = {}

    def folder(self, gateway: Address) -> Path:
        nursery = self._newest.get(gateway)
        if nursery is None or nursery.ended:
            nursery = self._newest[gateway] = Nursery(self._cfg, self._sandbox, gateway)
            self._by_folder[nursery.folder] = nursery
        return nursery.folder

    async def run(self, launch: Launch) -> Ended:
        async with self._places:
            return await self._by_folder[Path(launch.folder).parent].run(launch)


class Nursery:
    """One process to fork from, in walls that hold the folders of all its episodes."""

    def __init__(self, cfg: ProgramConfig, sandbox: Sandbox, gateway: Address):
        self._left = ExitStack()
        self.folder = self._left.enter_context(episode_folder())
        self._socket = self.folder / "socket"
        launch = nursery_launch(cfg, sandbox, gateway, self.folder, self._socket)
        self._up = False  # its function was imported
        self._life = asyncio.create_task(self._live(launch))

    async def _live(self, launch: Launch) -> Ended:
        with self._left:
            return await LocalProcesses(1).run(launch)

    @property
    def ended(self) -> bool:
        return self._life.done()

    async def run(self, launch: Launch) -> Ended:
        """See `Processes.run`. A function that cannot be imported has not started."""
        while not self._socket.exists():
            if self.ended and not self._up:
                return not_started(self._life.result())
            if self.ended:
                raise EnvironmentFault("the process to fork episodes from has ended")
            await asyncio.sleep(LOOK_SECONDS)
        self._up = True
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError as error:
            raise EnvironmentFault(f"the process to fork episodes from is gone: {error}") from error
        try:
            return await told(reader, writer, dataclasses.replace(launch, sandbox=OPEN))
        finally:
            await over(reader, writer)


async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, launch: Launch) -> Ended:
    """Tells a fork what to run, and what it reports. Raises EnvironmentFault."""
    report = b""
    with contextlib.suppress(ConnectionError):  # it died: its report is missing, too
        writer.write(json.dumps(order(launch)).encode() + b"\n")
        report = await reader.read()
    if not report.endswith(b"\n"):
        raise EnvironmentFault("the supervisor of an episode ended without a report")
    return read(json.loads(report))


async def over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ends the episode if it still runs, and waits until nothing of it is left."""
    with contextlib.suppress(OSError):
        writer.write_eof()
    ending = asyncio.ensure_future(reader.read())
    await asyncio.wait({ending})
    writer.close()


def not_started(nursery: Ended) -> Ended:
    """What an episode comes to whose nursery has ended before there was any."""
    last = nursery.stderr.strip().rpartition("\n")[2]
    return dataclasses.replace(nursery, how=How.NOT_STARTED, error=last or nursery.error)


def nursery_launch(
    cfg: ProgramConfig, sandbox: Sandbox, gateway: Address, folder: Path, socket: Path
) -> Launch:
    """How a nursery is run: without the limits of an episode, and told of none."""
    assert cfg.function is not None
    inherited = {name: os.environ[name] for name in cfg.inherit if name in os.environ}
    places = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    return Launch(
        # -P: modules are not looked for in the folder that it runs in.
        argv=(
            sys.executable,
            "-P",
            "-m",
            "forge_jax.agents.process_nursery",
            str(socket),
            cfg.function,
        ),
        env={**inherited, "HOME": str(folder / "home"), "PYTHONPATH": places},
        stdin="",
        folder=str(folder),
        workdir=str(folder / "work"),
        gateway=gateway,
        sandbox=sandbox,
        limits=LimitConfig(
            seconds=None,
            file_bytes=None,
            processes=cfg.places * (cfg.limits.processes + OURS),
        ),
    )
