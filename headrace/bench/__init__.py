"""``headrace bench``: measure a running server, or an engine without one, with vLLM's flags, metrics and results."""
