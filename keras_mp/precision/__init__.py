"""Chips, this machine's hardware, and the policy for it."""
