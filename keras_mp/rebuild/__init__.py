"""A model rebuilt from its config under a rule, with its state carried over."""
