"""Tokenizers and prompts; host only."""
