"""Where top-k and top-p cut, found without sorting."""

from __future__ import annotations

import torch

from gpu_worker.sampling.most_probable import sortable, unsortable

_LOWEST = torch.finfo(torch.float32).min


def least_kept(logits: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the least logit of each row such that the larger ones together weigh less than ``target``.

    With weights of 1 this is the logit of rank ``target``, with probabilities the last one of the nucleus. Bisection
    over the 32 bits of a float: the work is the same for every distribution, and no value is needed on the host.

    Args:
        logits: [rows, vocabulary] float32.
        weights: [rows, vocabulary] float32.
        target: [rows, 1] float32.
    """
    low = sortable(torch.full_like(target, _LOWEST)).long()
    high = torch.maximum(sortable(logits.amax(-1, keepdim=True)).long(), low)
    for _ in range(32):
        middle = (low + high) >> 1
        # 1 for larger logits, else 0; by arithmetic, which is several times as fast as a comparison on a CPU.
        larger = (logits - unsortable(middle.int())).sign_().clamp_min_(0.0)
        enough = larger.mul_(weights).sum(-1, keepdim=True) < target
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return unsortable(high.int())
