from keras_mp.conversion.model_file import ModelFileError as ModelFileError
from keras_mp.export.verification import ExportError as ExportError
from keras_mp.lowering.lowered import CompileError as CompileError
from keras_mp.parallel.cluster import ClusterError as ClusterError
from keras_mp.parallel.coordinator import LostWorkerError as LostWorkerError
from keras_mp.planner.report.compile_report import CheckError as CheckError
from keras_mp.rebuild.walk import RebuildError as RebuildError
from keras_mp.training.checkpoint_file import CheckpointError as CheckpointError
