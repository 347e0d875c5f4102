"""What every training recipe needs besides its model and its data: one idea a file."""
