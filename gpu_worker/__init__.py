"""Model execution: the process that holds the weights and the KV cache and computes the steps that the engine plans."""
