"""Which precision on which chip: the table of chips, this machine's hardware, the policy."""
