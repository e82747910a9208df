"""The one way a command starts and ends.

A Hydra config goes in; progress goes to stderr, and the last line of stdout is one
JSON object. Exit status: 0 done, 2 the caller's mistake, 1 a fault.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge_jax.config import UserError

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")


def command(config_name: str) -> Callable[..., Callable[[], None]]:
    """Decorates ``main(mapping) -> JSON-able mapping`` into a Hydra entry point."""

    def decorate(main: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)
        @functools.wraps(main)
        def entry(cfg: DictConfig) -> None:
            mapping = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            result = main(mapping)  # type: ignore[arg-type]
            print(json.dumps(result), flush=True)

        @functools.wraps(main)
        def run() -> None:
            # Hydra then raises instead of printing a trace and exiting with 1 itself.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            try:
                entry()
            except (UserError, HydraException, OmegaConfBaseException) as error:
                sys.exit(_complain(str(error)))

        return run

    return decorate


def _complain(message: str) -> int:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    print(f"error: {'; '.join(lines)}", file=sys.stderr, flush=True)
    return 2
