"""Answers without the chip: what its compiler makes of a step (`inspect`), which chips hold a training (`advise`)."""
