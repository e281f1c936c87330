# SPDX-License-Identifier: Apache-2.0
"""The chips that are compiled and planned for: public figures of one device each.

Sources: NVIDIA H200 data sheet (141 GB, 4.8 TB/s, 989 TFLOP/s bfloat16 without sparsity, NVLink 900 GB/s both ways);
NVIDIA HGX B200 data sheet (180 GB, 8 TB/s, 2.25 PFLOP/s bfloat16 without sparsity, NVLink 1.8 TB/s both ways); Google
Cloud documentation of TPU v5e (16 GB, 819 GB/s, 197 TFLOP/s, interconnect 1600 Gbit/s), v6e (32 GB, 1640 GB/s, 918
TFLOP/s, interconnect 800 GB/s both ways) and TPU7x (192 GiB, 7380 GB/s, 2307 TFLOP/s, interconnect 1200 GB/s both
ways; a chip is two devices, each with half of that).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# XLA's GpuTargetConfigProto in text form: the chips' public figures.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 150000000000  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
B200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 148  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 8000000000000  l2_cache_size: 132644864  clock_rate_ghz: 1.965
  device_memory_size: 191500000000  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 10 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA B200"
"""


@dataclass(frozen=True)
class Chip:
    """One device: bytes of memory, bfloat16 FLOP/s, bytes a second of memory and, one way, of all its links.

    `topologies` are, by the number of devices, what the platform's compiler calls so many of them, smallest first.
    `usable` is the share of the memory that a program can have, the rest being the runtime's. `kind` is what JAX calls
    the device. `description` is a GPU's target config in text form; a TPU's compiler knows its chips by topology.
    """

    name: str
    platform: str
    kind: str
    memory: int
    usable: float
    flops: float
    bandwidth: float
    link_bandwidth: float
    topologies: Mapping[int, str]
    description: str = ""

    @property
    def usable_memory(self) -> int:
        """Bytes that weights, pool and workspace can have together."""
        return int(self.memory * self.usable)


# Parts, hosts and devices a host: any number of GPUs of one host.
ONE_HOST = MappingProxyType({count: f"1x1x{count}" for count in (1, 2, 4, 8)})
GB, GIB = 10**9, 1 << 30
# JAX gives a GPU's programs three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says more; nine tenths are asked of it
# here. A TPU's compiler itself refuses programs beyond what is given as usable.
GPU_SHARE = 0.9


def _slices(generation: str) -> Mapping[int, str]:
    return MappingProxyType({4: f"{generation}:2x2", 8: f"{generation}:2x4"})


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("h200", "cuda", "NVIDIA H200", 141 * GB, GPU_SHARE, 989e12, 4.8e12, 450e9, ONE_HOST, H200),
            Chip("b200", "cuda", "NVIDIA B200", 180 * GB, GPU_SHARE, 2250e12, 8e12, 900e9, ONE_HOST, B200),
            Chip("v5e", "tpu", "TPU v5 lite", 16 * GIB, 15.75 / 16, 197e12, 819e9, 200e9, _slices("v5e")),
            Chip("v6e", "tpu", "TPU v6 lite", 32 * GIB, 31.25 / 32, 918e12, 1640e9, 400e9, _slices("v6e")),
            Chip("v7x", "tpu", "TPU7x", 96 * GIB, 0.98, 1153.5e12, 3690e9, 300e9, {8: "tpu7x:2x2x1"}),
        )
    }
)
