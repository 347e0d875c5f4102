"""The operating system and installed packages; nothing of Keras."""
