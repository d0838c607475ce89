"""The scheduler and the paged KV block manager: decides what each worker computes in each step."""
