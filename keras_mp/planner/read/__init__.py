"""What a compiled step says: products, memory, collectives."""
