"""What a program is told of its episode: arguments, environment, files.

A `ProgramConfig` and the facts of an episode flow in, texts flow out. The environment is what is
listed here and what the configuration names; nothing else of the trainer's is passed on.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from forge_jax.programs import PLACE, ProgramConfig

Facts = Mapping[str, str]  # by the names in `programs.PLACES`

# Every convention by which clients look for their model. Anthropic's want the root of the server.
MODEL = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_BASE": "{base_url}",
    "OPENAI_API_KEY": "{api_key}",
    "OPENAI_MODEL": "{model}",
    "ANTHROPIC_BASE_URL": "{root_url}",
    "ANTHROPIC_API_KEY": "{api_key}",
    "ANTHROPIC_AUTH_TOKEN": "{api_key}",
    "ANTHROPIC_MODEL": "{model}",
    "LITELLM_PROXY_API_BASE": "{base_url}",
    "LITELLM_PROXY_API_KEY": "{api_key}",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be downloaded
    "MODEL": "{model}",
}
QUOTED = (".json", ".jsonc", ".toml", ".yaml", ".yml")


def facts_of(base_url: str, api_key: str, model: str, prompt: str, folder: Path) -> Facts:
    """`base_url` ends in /v1."""
    base = base_url.rstrip("/")
    return {
        "base_url": base,
        "root_url": base.removesuffix("/v1"),
        "api_key": api_key,
        "model": model,
        "prompt": prompt,
        "workdir": str(folder / "work"),
        "home": str(folder / "home"),
    }


def filled(text: str, facts: Facts) -> str:
    """`text` with facts in place of their names; what they hold is not looked at again."""
    return PLACE.sub(lambda found: facts[found[1]], text)


def environment_of(cfg: ProgramConfig, facts: Facts, ours: Mapping[str, str]) -> dict[str, str]:
    """All variables of a program; `ours` are the trainer's, of which some are inherited."""
    home = facts["home"]
    places = {
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_CACHE_HOME": f"{home}/.cache",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
        "TMPDIR": str(Path(home).parent / "tmp"),
        "PWD": facts["workdir"],
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
    inherited = {name: ours[name] for name in cfg.inherit if name in ours}
    model = {name: filled(text, facts) for name, text in MODEL.items()}
    own = {name: None if text is None else filled(text, facts) for name, text in cfg.env.items()}
    merged: dict[str, str | None] = {**inherited, **places, **model, **own}
    return {name: value for name, value in merged.items() if value is not None}


def files_of(cfg: ProgramConfig, facts: Facts) -> dict[str, str]:
    """The files of a program; in JSON, TOML and YAML a fact stands as it does in double quotes."""
    quoted = {name: json.dumps(value)[1:-1] for name, value in facts.items()}
    return {
        path: filled(text, quoted if PurePosixPath(path).suffix in QUOTED else facts)
        for path, text in cfg.files.items()
    }
