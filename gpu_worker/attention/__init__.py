"""Attention over the paged KV cache; one file for each backend."""
