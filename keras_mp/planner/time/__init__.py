"""How long a step takes: the bound, and the prediction."""
