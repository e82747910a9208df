"""A program is an agent: told where its model is, held in its folder, scored outside it."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from black_box_play import PYTHON, TASK, World, config, episode
from stand_in_server import replies, stand_in

from forge_jax.agents import black_box_folder as folders
from forge_jax.agents.black_box import black_box
from forge_jax.agents.families import agent_of
from forge_jax.agents.runner import run_episode
from forge_jax.agents.tasks.hop import world_of
from forge_jax.config import UserError
from forge_jax.loading import load
from forge_jax.programs import ProgramConfig
from forge_jax.types import Outcome, Status

ASK = """
import json, os, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": input()}]}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
call = urllib.request.Request(url, json.dumps(body).encode(), key)
print(json.load(urllib.request.urlopen(call))["choices"][0]["message"]["content"])
"""


@pytest.mark.parametrize("kind", ["none", "auto"])
def test_a_program_calls_its_model_and_is_scored_by_what_it_printed(kind: str) -> None:
    world = World()
    outcome = episode(config(command=[*PYTHON, ASK], sandbox={"kind": kind}), world, "hello")
    assert (outcome.status, outcome.reward, outcome.error) == (Status.COMPLETED, 1.0, "")
    assert world.seen == ["hello\n"]


def test_a_function_is_called_in_a_process_of_its_own() -> None:
    world = World(prompt="a prompt")
    cfg = load(ProgramConfig, {"function": "black_box_functions:answer"})
    assert episode(cfg, world).status is Status.COMPLETED
    said = json.loads(world.seen[0])
    assert said["prompt"] == "a prompt"
    assert said["pid"] != os.getpid()
    assert said["model"] == "m"


def test_the_environment_is_what_is_named_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("OPENAI_ORG_ID", "ours")
    monkeypatch.setenv("NAMED", "n")
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    world = World()
    cfg = config(
        command=[*PYTHON, show],
        inherit=["PATH", "NAMED"],
        env={"OWN": "{model} at {root_url}", "ANTHROPIC_AUTH_TOKEN": None},
    )
    episode(cfg, world)
    told = json.loads(world.seen[0])
    base, root = told["OPENAI_BASE_URL"], told["ANTHROPIC_BASE_URL"]
    assert base == root + "/v1" == told["OPENAI_API_BASE"] == told["LITELLM_PROXY_API_BASE"]
    assert told["OPENAI_API_KEY"] == told["ANTHROPIC_API_KEY"] == "unused"
    assert (told["MODEL"], told["OWN"], told["NAMED"]) == ("m", f"m at {root}", "n")
    assert not {"SECRET", "OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN"} & set(told)
    folder = Path(told["HOME"]).parent
    assert told["TMPDIR"] == str(folder / "tmp")
    assert not folder.exists()


def test_files_are_filled_and_quoted_as_their_format_needs() -> None:
    world = World(prompt='say "so"\nand {model}')
    read = (
        "import os; print(open(os.environ['HOME'] + '/.c/a.json').read()); print(open('b').read())"
    )
    cfg = config(
        command=[*PYTHON, read],
        stdin="",
        files={
            "home/.c/a.json": '{"p": "{prompt}", "m": {"name": "{model}"}, "other": "{{task}}"}',
            "work/b": "{prompt}",
        },
    )
    episode(cfg, world)
    first, _, rest = world.seen[0].partition("\n")
    assert json.loads(first) == {"p": world.prompt, "m": {"name": "m"}, "other": "{{task}}"}
    assert rest.strip() == world.prompt


REFUSED = {
    "{modle} is none of": {"command": ["x", "{modle}"]},
    "files.home/a: {user} is none of": {"command": ["x"], "files": {"home/a": "{user}"}},
    "give one of them": {"command": ["x"], "function": "a:b"},
    "it would never be told": {"command": ["x"], "stdin": ""},
    "must be below home/ or work/": {"command": ["x"], "files": {"../a": ""}},
    "must be module:function": {"function": "a.b", "stdin": ""},
    "env.A=3 must be a text": {"command": ["x"], "env": {"A": 3}},
    "unknown key": {"command": ["x"], "colour": "red"},
    "nonzero='ok'": {"command": ["x"], "nonzero": "ok"},
    "kind='docker'": {"command": ["x"], "sandbox": {"kind": "docker"}},
    "grace=60": {"command": ["x"], "limits": {"grace": 60}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused_before_any_episode(message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config(**REFUSED[message])


def test_a_program_that_is_not_there_is_refused_before_any_episode() -> None:
    with pytest.raises(UserError, match="no-such-program"):
        black_box(config(command=["no-such-program"]), lambda task: World())


def test_a_family_without_a_workspace_is_refused() -> None:
    with pytest.raises(UserError, match="notes"):
        agent_of("notes", config(command=["true"]))


@pytest.mark.parametrize("where", ["setup", "score"])
def test_a_broken_world_is_not_the_programs_fault(where: str) -> None:
    outcome = episode(config(command=["true"]), World(broken=where))
    assert outcome.status is Status.ENVIRONMENT_FAILED
    assert f"no {where}" in outcome.error


def test_an_exit_status_fails_or_is_scored_as_configured() -> None:
    script = [*PYTHON, "import sys; print('out'); print('why', file=sys.stderr); sys.exit(3)"]
    failed = episode(config(command=script), World())
    assert (failed.status, failed.error) == (Status.AGENT_FAILED, "exit status 3: why")
    assert episode(config(command=script, nonzero="scored"), World()).reward == 1.0


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def left(*links: Callable[[Path], None]) -> Callable[[Path], folders.Reader]:
    def make(place: Path) -> folders.Reader:
        (place / "work").mkdir()
        for link in links:
            link(place)
        return folders.Reader(place / "work")

    return make


TRICKS: Mapping[str, Callable[[Path], Any]] = {
    "a": lambda place: (place / "work/a").symlink_to(place / "secret"),
    "d/secret": lambda place: (place / "work/d").symlink_to(place),
    "pipe": lambda place: os.mkfifo(place / "work/pipe"),
    "../secret": lambda place: None,
    "/etc/passwd": lambda place: None,
    "sub": lambda place: (place / "work/sub").mkdir(),
    "big": lambda place: sparse(place / "work/big", folders.LARGEST + 1),
}


@pytest.mark.parametrize("path", TRICKS)
def test_a_verifier_reads_nothing_outside_the_folder(path: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    reader = left(TRICKS[path])(tmp_path)
    with pytest.raises(OSError, match=re.escape(path.split("/")[0] or path)):
        reader.read(path)


def test_a_verifier_reads_files_of_the_folder(tmp_path: Path) -> None:
    reader = left(lambda place: (place / "work/d").mkdir())(tmp_path)
    (tmp_path / "work/d/f").write_text("text")
    assert reader.read("d/f") == b"text"


def test_hop_as_files_is_solved_by_reading_them() -> None:
    follow = (
        "import re; key = re.search('file ([a-z])', input().split('Start')[1])[1]\n"
        "while key.isalpha(): key = open(key).read()\n"
        "print('thinking'); print('!' + key)"
    )

    async def run(script: str) -> Outcome:
        answer, _ = replies()
        async with stand_in(answer) as client:
            agent = agent_of("hop", config(command=[*PYTHON, script]))
            return await run_episode(agent, TASK, client, "m", 60.0)

    assert asyncio.run(run(follow)).reward == 1.0
    wrong = str((int(world_of(TASK).chain[-1]) + 1) % 10)
    assert asyncio.run(run(f"print('!{wrong}')")).reward == 0.0
