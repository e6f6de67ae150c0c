"""What is measured: one module a subject, each with `decode(...)` and `prefill(...)` that run in a process of their own.

Both take JSON-ready keyword arguments and return a JSON-ready dict: figures, or `{"missing": why}` where the subject is not
installed or cannot run this model. `token_ids`, the greedy answer of the first sequence, is for comparing subjects.
"""

WARMUP_STEPS = 2
"""Decode steps before the ones that count."""

WARMUP_PROMPT_TOKENS = 64
"""Length of the prompt that is prefilled before the one that counts."""
