"""Which chips hold the training of a model, and what makes it fit."""
