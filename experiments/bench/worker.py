"""One process of a benchmark: it does its job a piece at a time, whenever it is asked to.

    python -m experiments.bench.worker

The job comes as a line of JSON on stdin; each line after it asks for the next piece, and is
answered by a line of JSON on stdout. Between two pieces the process computes nothing. It ends
with its input; a mistake in the job ends it with 2, as it does a command.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from experiments.bench.machine import multiplications, own_peak_rss
from experiments.command import complaining
from experiments.replay import ReplayConfig, counts, load_replay, read, step_config, timed_update
from forge_jax.rl.state import create
from forge_jax.sched.pack import micro_batches


def update_job(cfg: ReplayConfig) -> dict[str, Any]:
    """What `worker` is to do for whole updates of a replay."""
    return {"job": "updates", "config": dataclasses.asdict(cfg)}


def product_job() -> dict[str, Any]:
    """What `worker` is to do for the machine's rate of multiplication."""
    return {"job": "products"}


def updates(cfg: ReplayConfig) -> Iterator[dict[str, Any]]:
    """Update after update, each timed as `experiments.replay` times its steps.

    The first one compiles everything; its loss and gradient norm are of the fresh weights.
    """
    console = Console(stderr=True)
    model, samples = read(cfg, console)
    step_cfg = step_config(cfg, model.cfg)
    state = create(model.params, cfg.optim)
    del model
    sizes = counts(samples, micro_batches(samples, cfg.merge, cfg.pack), step_cfg)
    facts = {key: sizes[key] for key in ("tokens_computed", "attention_area_executed")}
    while True:
        cpu = time.process_time()
        state, updated, seconds = timed_update(state, samples, cfg, step_cfg)
        yield facts | {
            "loss": updated.loss,
            "grad_norm": updated.grad_norm,
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "peak_rss_bytes": own_peak_rss(),
        }


def start(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pieces of a job."""
    if job["job"] == "products":
        return multiplications()
    return updates(load_replay(job["config"]))


def serve(start: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Does the job that stdin names, a piece for each further line."""
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with complaining():
        pieces = start(json.loads(sys.stdin.readline()))
        for _ in sys.stdin:
            print(json.dumps(next(pieces)), file=answers, flush=True)


if __name__ == "__main__":
    serve(start)
