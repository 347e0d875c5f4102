"""What every recipe needs besides its model and its data: one idea a file."""
