"""Task families: one module each, made by seeded generators.

A family offers `agent()`, which works at its tasks, and `play(rng)`, scripted episodes
to imitate.
"""
