"""What the compiler of a chip makes of a training step."""
