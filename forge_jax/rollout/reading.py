"""What a round sampled, as chunks.

Results flow in, chunks flow out; jobs, their stays and the tree's nodes take in what became
known. Invariant: what leaves of a job are its tokens, each once and in order, and after its
first tokens the routes of all that were fed.
"""

from typing import Any

import numpy as np

from forge_jax.drawing import Support
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.packets import (
    EXHAUSTED,
    GOES_ON,
    IDLE,
    LOGP,
    RAW,
    SAMPLED,
    STATUS,
    STOPPED,
    Sampled,
    Scores,
)
from forge_jax.rollout.plans import Results
from forge_jax.rollout.shaped import Draws
from forge_jax.types import Chunk, Finish


def read_prefills(results: Results, page: int) -> None:
    """Takes in what the prefill calls of a round computed beside keys and values."""
    calls = zip(results.plan.prefills, results.routes, results.scores, strict=True)
    for call, routes, scores in calls:
        for part in call.parts:
            job = part.stay.job
            job.began = results.began if job.began is None else job.began
            if scores is not None:
                told = Scores(*(x[part.row, : part.length] for x in scores))
                _check_finite(told.logprobs, results)
                job.score(part.start, told)
            if routes is not None:
                job.record(part.start, routes[part.row, : part.length])
                for number, node in part.published:
                    node.routes = routes_of(job, number, page)


def _check_finite(logprobs: np.ndarray, results: Results) -> None:
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(f"weights of version {results.version} gave {logprobs=}")


def routes_of(job: Job, number: int, page: int) -> np.ndarray | None:
    """A copy of the routes of a page of a sequence."""
    return None if job.routes is None else job.routes[number * page : (number + 1) * page].copy()


def sampled_by(block: Sampled, row: int) -> tuple[np.ndarray, np.ndarray | None, Draws | None]:
    """What a decode call sampled in a row, i32[n, 4], the routes of the tokens that were fed
    for it, and what they were drawn from where some request shaped that."""
    real = block.packet[:, :, row, STATUS] != IDLE

    def own(x: np.ndarray) -> np.ndarray:
        return x[:, :, row][real]

    routes = None if block.routes is None else own(block.routes)
    draws = None if block.draws is None else Draws(*map(own, block.draws))
    return own(block.packet), routes, draws


def _told(job: Job, draws: Draws | None, count: int) -> dict[str, Any]:
    """What a chunk tells of its draws, where the request has settings."""
    if draws is None or not job.sampling.shaped:
        return {}
    support = Support(
        ids=draws.ids[:count],
        offsets=draws.offsets[:count],
        kind=draws.kind[:count].astype(np.int8),
    )
    told: dict[str, Any] = {"support": support}
    most = job.sampling.top_logprobs
    if most:
        told["top_ids"] = draws.top_ids[:count, :most]
        told["top_logprobs"] = draws.top_logprobs[:count, :most]
    return told


def chunk_of(
    stay: Stay,
    packet: np.ndarray,
    fed: np.ndarray | None,
    draws: Draws | None,
    results: Results,
    page: int,
) -> Chunk:
    """The chunk of what was sampled, one token or more; the job has it from then on."""
    job = stay.job
    packet, finish, stop_text = cut(job, packet)
    ids, count = np.ascontiguousarray(packet[:, SAMPLED]), len(packet)
    logprobs, raw = (
        np.ascontiguousarray(packet[:, column]).view(np.float32) for column in (LOGP, RAW)
    )
    _check_finite(logprobs, results)
    if fed is not None:
        job.record(job.length - 1, fed[:count])
    job.began = results.began if job.began is None else job.began
    job.tokens[job.length : job.length + count] = ids
    job.length += count
    first, job.silent = job.silent, False
    return Chunk(
        ids=ids,
        logprobs=logprobs,
        versions=np.full(count, results.version, np.int32),
        finish=finish,
        stop_text=stop_text,
        queue_seconds=job.began - job.submitted if first else 0.0,
        cached_tokens=job.cached if first else 0,
        routes=None if fed is None else _leaving(stay, page),
        raw=raw,
        prompt=job.scores if first else None,
        **_told(job, draws, count),
    )


def cut(job: Job, packet: np.ndarray) -> tuple[np.ndarray, Finish | None, str | None]:
    """What was sampled up to where the completion ends, and why it does."""
    stop_text, status = None, packet[-1, STATUS]
    if job.certain is not None:
        count = job.certain.feed(np.ascontiguousarray(packet[:, RAW]).view(np.float32))
        if count is not None and (count < len(packet) or status == GOES_ON):
            packet, status = packet[:count], EXHAUSTED
    if job.stop is not None:
        found = job.stop.feed(packet[:, SAMPLED].tolist())
        if found is not None:
            packet, stop_text = packet[: found[0]], found[1]
        elif status != GOES_ON:
            stop_text = job.stop.flush()
    if stop_text is not None or status == STOPPED:
        return packet, Finish.STOP, stop_text
    return packet, Finish.LENGTH if status == EXHAUSTED else None, None


def _leaving(stay: Stay, page: int) -> np.ndarray:
    """Routes of the tokens fed that have not left yet."""
    job = stay.job
    for number, node in enumerate(stay.nodes[: stay.found]):
        if (number + 1) * page > job.routed and node.routes is not None:
            job.record(number * page, node.routes)
    start, job.routed = job.routed, job.length - 1
    assert job.routes is not None, "no routes were read"
    return job.routes[start : job.routed].copy()
