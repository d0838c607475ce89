"""Building blocks of the models. Plain callables without gradients, made from loaded tensors."""
