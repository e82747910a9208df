"""What several engines tell of themselves, as if they were one.

`stats()` of engines go in, one mapping of the same names comes out. Counts add up; rates do not.
"""

from collections.abc import Mapping, Sequence

# Numbers that do not add up over engines, by how their names begin.
MEANS = ("slot_utilisation", "programs_traced", "acceptance_", "speedup_")
LEASTS = ("weight_version",)


def together(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums over the engines; of rates means over those that tell them, of the version the
    least. Tokens of a verify are those of all verifies."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one in told for name in one):
        values = [one[name] for one in told if name in one]
        if name.startswith(LEASTS):
            found[name] = min(values)
        else:
            found[name] = sum(values) / (len(values) if name.startswith(MEANS) else 1)
    if "tokens_per_verify" in found:
        verifies = found["drafts"]
        found["tokens_per_verify"] = 1 + found["accepted_tokens"] / verifies if verifies else 1.0
    return found
