"""mini-swe-agent: its default agent with the configuration that it comes with."""

import os
from functools import partial
from pathlib import Path

import minisweagent
import yaml
from driving import FOUND, MODEL, TASK, looked, main
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

CONFIGS = Path(minisweagent.__file__).parent / "config"


def play(
    root: str, model: type = LitellmModel, config: str = "mini", provider: str = "openai"
) -> str:
    settings = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    Path("drawer.txt").write_text(FOUND)
    base = f"{root}/v1" if provider == "openai" else root
    options = dict(settings["model"])
    options["model_kwargs"] = {**options.get("model_kwargs", {}), "api_base": base, "api_key": "k"}
    agent_options = {
        key: settings["agent"][key] for key in ("system_template", "instance_template")
    }
    agent = DefaultAgent(
        model(**options, model_name=f"{provider}/{MODEL}", cost_tracking="ignore_errors"),
        LocalEnvironment(cwd=os.getcwd()),
        **agent_options,
    )
    done = agent.run(TASK)
    looked.extend(Path("seen.txt").read_text().split())
    Path("seen.txt").unlink()
    return done["submission"]


main(
    {
        "chat": play,
        "messages": partial(play, provider="anthropic"),
        "responses": partial(play, model=LitellmResponseModel),
        "text": partial(play, model=LitellmTextbasedModel, config="mini_textbased"),
    }
)
