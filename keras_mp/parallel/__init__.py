"""One script on several devices or machines: `distribute`, and what is behind it."""
