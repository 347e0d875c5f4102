"""ctrl-C and SIGTERM end a training after a whole step, so that the model can still be saved."""

import signal
import threading

import keras

from keras_mp.parallel import workers


class StopOnInterrupt(keras.callbacks.Callback):
    """A callback and a context: within it, the first ctrl-C or SIGTERM stops `fit` soon, the second at once.

    Where several processes train on JAX, JAX itself takes SIGTERM. An exception from within a step would leave the
    weights of a JAX model in buffers that are gone.
    """

    supports_multiprocess = True

    def __init__(self):
        super().__init__()
        self.interrupted = False

    def __enter__(self):
        # Only the main thread may set a signal handler; elsewhere ctrl-C does not arrive anyway.
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            together_on_jax = workers.count() > 1 and keras.backend.backend() == "jax"
            for number in (signal.SIGINT, *(() if together_on_jax else (signal.SIGTERM,))):
                self._previous[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number, frame):
        self.interrupted = True
        for other in self._previous:
            signal.signal(other, signal.default_int_handler)
        print("\nstopping after the next step; press ctrl-C again to stop at once", flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        # Before a step and not after it, so that other processes of the training can stop after the same one.
        if self.interrupted:
            self._model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        # Another process of the training may have been the one that was interrupted.
        self.interrupted |= bool(self._model.stop_training)
