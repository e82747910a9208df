"""Reinforcement learning of LLM agents at scale, in JAX. See docs/architecture.md."""
