"""``headrace simulate``: the real scheduler and block manager against a time model of the device."""
