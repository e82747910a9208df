"""How often each compiled program of the engine was traced: constant once all shapes are warm."""

from collections import Counter

traces: Counter[str] = Counter()
