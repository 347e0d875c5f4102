"""What stands behind the figures of NVIDIA's GPUs, in words that several rows share."""

SPARSE = "; the tensor-core figures are half of the sparse ones printed there"
# NVIDIA's own pages could not be opened when this was written. What stands in for them is said in each row, and
# the tests compute every figure again from the number of units, their width and their clock.
NOT_OPENED = "; NVIDIA's page itself not opened, figures checked against "
DATA_SHEET = "NVIDIA %s data sheet (not opened)"
WHITE_PAPER = "NVIDIA %s white paper (not opened)"
# Its tables repeat NVIDIA's data sheets and white papers: units, clocks, memory, and tensor rates by accumulator.
GPUMAP = "https://github.com/lamonoai/gpumap, nvidia/GPU.md"
NANOCHAT = "the 16-bit rate also from nanochat/common.py of https://github.com/karpathy/nanochat"
# In the compiler's description. `XLA` takes the name of a file in xla/backends/gpu/target_config/specs.
DEVICE_QUERY = "; memory, clock and L2 as deviceQuery prints them"
NO_DEVICE_QUERY = "; no deviceQuery found, so the compiler is given the whole memory"
XLA = "; memory, clock and L2 from XLA's %s.txtpb"
# Units, width and clock make these figures, too: twice the 16-bit rate.
INT8 = "; INT8 from https://hmc-tech.com/gpu/%s"
A100 = "nvidia-h100-vs-nvidia-a100-sxm-40gb"
