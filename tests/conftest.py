"""One process-wide jax setup: eight virtual CPU devices and strict shapes."""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_module() -> Iterator[None]:
    """Compiled programs live as long as the module that made them: together they would need
    more memory mappings than a process may have (vm.max_map_count), and XLA then crashes."""
    yield
    jax.clear_caches()
