"""A step as a program, and compiled for a chip."""
