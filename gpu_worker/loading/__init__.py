"""Weights: where they come from, and how they become a model."""
