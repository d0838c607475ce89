"""The HTTP side of Headrace: the OpenAI-compatible API, authentication, admission, streaming and metrics."""
