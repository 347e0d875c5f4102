"""`python -m keras_mp.cli`."""

from keras_mp.cli import main

main()
