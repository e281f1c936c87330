# SPDX-License-Identifier: Apache-2.0
"""Machines that steps are compiled for while none of them is attached.

JAX asks the compilers of its GPU and TPU plugins for a topology's devices. No driver is touched. The process must
run with `JAX_PLATFORMS=cpu` in its environment, or JAX would first look for the devices themselves.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from metrale_jax.core.errors import ConfigError

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
PLUGINS: Mapping[str, str] = MappingProxyType({"cuda": "jax_cuda13_plugin", "tpu": "libtpu"})


@dataclass(frozen=True)
class Target:
    """A chip: `platform` as `pallas_kernels.dispatch` calls it, `topology` as its compiler does, memory of one device.

    `description` is a GPU's target config in text form; a TPU's compiler knows its chips by topology.
    """

    name: str
    platform: str
    topology: str
    memory_gb: float
    description: str = ""

    def devices(self) -> Sequence[jax.Device]:
        """Devices to compile for. Raises `ConfigError` if the platform's compiler is not installed."""
        if importlib.util.find_spec(PLUGINS[self.platform]) is None:
            raise ConfigError(
                f"target {self.name!r} needs the {self.platform} compiler, which is not installed; run "
                "`pip install 'metrale-jax[aot]'`."
            )
        facts = {"target_config": self.description, "topology": self.topology} if self.description else {}
        try:
            return topologies.get_topology_desc(platform=self.platform, topology_name=self.topology, **facts).devices
        except NotImplementedError as error:
            raise ConfigError(
                f"target {self.name!r}: JAX did not register the {self.platform} compiler ({error}); run with "
                "JAX_PLATFORMS=cpu in the environment."
            ) from error


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target("h200", "cuda", "1x1x1", 141.0, H200),
            Target("b200", "cuda", "1x1x1", 180.0, B200),
            Target("v5e", "tpu", "v5e:2x2", 16.0),
            Target("v6e", "tpu", "v6e:2x2", 32.0),
            Target("v7x", "tpu", "tpu7x:2x2x1", 96.0),
        )
    }
)


def target_for(name: str) -> Target:
    """The target of that name. Raises `ConfigError` with the list if it is unknown."""
    if name not in TARGETS:
        raise ConfigError(f"target {name!r} is unknown; use one of {sorted(TARGETS)}.")
    return TARGETS[name]
