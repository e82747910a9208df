"""The machine that a benchmark ran on: what it is, how busy it is, how fast it multiplies."""

import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.replay import peak_rss

SIDE = 2048  # of the matrices whose product is the machine's rate
PRODUCTS = 3  # in one sample of it


def hardware() -> dict[str, Any]:
    """Processor, its cores, bytes of memory, and versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "jax": version("jax"),
        "python": platform.python_version(),
    }


def line(found: dict[str, Any]) -> str:
    """`hardware()` in one line."""
    memory = found["memory_bytes"] / 2**30
    return (
        f"{found['cpu']}, {found['cores']} cores, {memory:.0f} GiB, "
        f"jax {found['jax']}, Python {found['python']}"
    )


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def own_peak_rss() -> int:
    """Bytes of this process at its largest.

    Linux counts in `peak_rss` what the parent held when it made this process.
    """
    peak = _field("/proc/self/status", "VmHWM")
    return int(peak.split()[0]) * 1024 if peak else peak_rss()


def multiplications() -> Iterator[dict[str, float]]:
    """Once compiled ({}), FLOPs a second of a large fp32 matrix product, sample by sample."""
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    yield {}
    while True:
        seconds = []
        for _ in range(PRODUCTS):
            began = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            seconds.append(time.perf_counter() - began)
        yield {"flops_per_second": 2 * SIDE**3 / statistics.median(seconds)}


def _field(file: str, name: str) -> str:
    """The first value of `name` in a file of ``name : value`` lines; empty without one."""
    if not Path(file).is_file():
        return ""
    for entry in Path(file).read_text().splitlines():
        key, _, value = entry.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
