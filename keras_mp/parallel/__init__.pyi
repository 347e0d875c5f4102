from keras_mp.parallel import workers as workers
from keras_mp.parallel.cluster import find_cluster as find_cluster
from keras_mp.parallel.distribution import distribute as distribute
from keras_mp.parallel.distribution import gather as gather
from keras_mp.parallel.split_rules import tensor_rules as tensor_rules
from keras_mp.parallel.workers import join as join
