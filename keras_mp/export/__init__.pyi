from keras_mp.conversion.other_precision import in_precision as in_precision
from keras_mp.export.litert import export_litert as export_litert
from keras_mp.export.onnx import export_onnx as export_onnx
