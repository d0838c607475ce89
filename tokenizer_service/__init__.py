"""Text to token ids and back: encoding, chat templates, incremental decoding, stop strings."""
