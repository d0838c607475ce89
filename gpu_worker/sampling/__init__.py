"""From logits to tokens: an ordered pipeline of small components, one file for each."""
