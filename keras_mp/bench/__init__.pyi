from keras_mp.bench.timing import benchmark as benchmark
