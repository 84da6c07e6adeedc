"""Prompts, their order, and how a completion is scored; host side, no JAX."""
