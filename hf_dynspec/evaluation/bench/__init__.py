"""Tokens per second of plain generate, transformers' assisted generation and every policy, on the same prompts."""
