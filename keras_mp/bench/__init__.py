"""How fast a training step runs, and in how much memory: side by side, in one run."""
