"""The keys of a `config.json`, read with errors that name the file, the key and the value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forge_jax.config import UserError
from forge_jax.models.config import RopeScaling

LLAMA3 = {
    "factor": ("factor", float),
    "low_frequency": ("low_freq_factor", float),
    "high_frequency": ("high_freq_factor", float),
    "original_context": ("original_max_position_embeddings", int),
}


class Rope(NamedTuple):
    """Rotary positions as a `config.json` describes them."""

    theta: float
    scaling: RopeScaling | None
    partial: float  # share of a head's dimensions that is rotated


@dataclass(frozen=True)
class Keys:
    """What a `config.json` says."""

    file: Path
    raw: Mapping[str, Any]

    def of(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind`; `default` where it is absent or null and there is one."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.file}: missing {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.file}: {key}={value!r} must be {kind.__name__}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Raises UserError where the key is there with another value."""
        if key in self.raw and not any(_same(self.raw[key], value) for value in allowed):
            known = " or ".join(map(repr, allowed))
            raise UserError(f"{self.file}: {key}={self.raw[key]!r} is unsupported, only {known}")

    def rope(self, scaled: bool = False, partial: bool = False) -> Rope:
        """Rotary positions, in either generation of the format.

        What a family does not have (`scaled`, `partial`) is refused, as is every other kind.
        """
        key = "rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling"
        rope = dict(self.raw.get(key) or {})
        inner = Keys(self.file, rope)
        base = rope.pop("rope_theta", self.raw.get("rope_theta"))
        share = self.raw.get("partial_rotary_factor", 1.0)
        if partial:
            share = rope.pop("partial_rotary_factor", share)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        stretched = scaled and kind == "llama3" and set(rope) == {k for k, _ in LLAMA3.values()}
        if (kind != "default" or rope) and not stretched:
            raise UserError(f"{self.file}: {key}={self.raw[key]!r} is unsupported")
        if share != 1 and not partial:
            raise UserError(f"{self.file}: partial_rotary_factor={share!r} is unsupported")
        scaling = None
        if stretched:
            scaling = RopeScaling(
                **{ours: inner.of(k, type_) for ours, (k, type_) in LLAMA3.items()}
            )
        return Rope(Keys(self.file, {"rope_theta": base}).of("rope_theta", float), scaling, share)


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and no `True` for 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
