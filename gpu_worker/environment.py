"""What the libraries of a model read from the environment when they are loaded. Imports no torch, for that reason."""

from __future__ import annotations

import os

SPIN_COUNT = "100000"
PRODUCTS_KEPT = 128
"""Shapes of matrix products whose compiled code is kept on a CPU, some 0.6 MiB each; a miss takes about a millisecond.

A shape is a number of rows and a layer's size, so that a model of six sizes keeps the last 21 numbers of rows: decode
steps of as many requests as before hit. By default the libraries keep 1,024 of each kind, which no load repeats, and
which fill up over hours: several hundred MiB.
"""
_CHOICES = (
    (("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"), "GOMP_SPINCOUNT", SPIN_COUNT),
    (("LRU_CACHE_CAPACITY",), "LRU_CACHE_CAPACITY", str(PRODUCTS_KEPT)),
    # oneDNN's own cache below it, in which each of these takes two places.
    (
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        str(2 * PRODUCTS_KEPT),
    ),
)
"""(variables by which a user chooses, variable, value otherwise)."""


def prepare_environment() -> None:
    """Bound the spinning of OpenMP's threads and the memory of compiled matrix products, each unless the user chose
    otherwise. Before torch is imported."""
    for names, variable, value in _CHOICES:
        if not os.environ.keys() & set(names):
            os.environ[variable] = value
