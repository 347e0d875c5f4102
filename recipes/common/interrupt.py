"""ctrl-C ends a training after a whole step, so that the model can still be saved."""

import signal
import threading

import keras


class StopOnInterrupt(keras.callbacks.Callback):
    """A callback and a context: within it, the first ctrl-C stops `fit` after its next step, the second at once.

    An exception from within a step would leave the weights of a JAX model in buffers that are gone.
    """

    supports_multiprocess = True

    def __init__(self):
        super().__init__()
        self.interrupted = False

    def __enter__(self):
        # Only the main thread may set a signal handler; elsewhere ctrl-C does not arrive anyway.
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception):
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number, frame):
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after the next step; press ctrl-C again to stop at once", flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        # Before a step and not after it, so that other processes of the training can stop after the same one.
        if self.interrupted:
            self.model.stop_training = True
