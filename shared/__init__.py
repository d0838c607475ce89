"""What crosses the borders between Headrace's processes: messages, codec, transport, parameters, configuration."""
