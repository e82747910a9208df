"""One process-wide jax setup: eight virtual CPU devices, strict shapes, quick compilation.

Nearly all of the time of these tests would be compilation of programs that then run for
milliseconds. So XLA neither optimises nor fuses by its emitters, here and in the processes that
tests start with this environment, and what several of them compile is compiled once.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false"
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # one for all workers, unless the user keeps one
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="forge-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module() -> Iterator[None]:
    """Compiled programs live as long as the module that made them: together they would need
    more memory mappings than a process may have (vm.max_map_count), and XLA then crashes."""
    yield
    jax.clear_caches()
