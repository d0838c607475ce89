"""The parts of ``headrace.LLM``: processes without HTTP, the link to them, and what goes in and comes out."""
