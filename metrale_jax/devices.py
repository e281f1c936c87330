# SPDX-License-Identifier: Apache-2.0
"""The machine's own devices: which of them share a model, what kind they are, and how to do without them."""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax

from metrale_jax.aot.chips import Chip
from metrale_jax.aot.targets import Target
from metrale_jax.core.errors import ConfigError

# What libtpu reads, and would otherwise ask a machine's metadata server for; and that compilers tell of errors alone.
COMPILER_ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# Of this machine's memory, what programs can have beside all else that runs.
HOST_SHARE = 0.9


def devices_for(device: jax.Device | Sequence[jax.Device] | None, tensor_parallel: int) -> list[jax.Device]:
    """The devices that share a model: `device`, or the first `tensor_parallel` of JAX's. Raises `ConfigError` if there
    are fewer."""
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel={tensor_parallel!r} is not an integer above 0; give a count of devices.")
    if device is not None:
        return list(device) if isinstance(device, Sequence) else [device]
    found = jax.devices()
    if tensor_parallel > len(found):
        raise ConfigError(
            f"tensor_parallel={tensor_parallel} needs as many devices, {len(found)} of {found[0].platform} are here; "
            "ask for less."
        )
    return found[:tensor_parallel]


def device_kind(device: jax.Device) -> str:
    """What a program that was compiled for a device needs to find again: JAX's name of its kind where that says it
    all."""
    return KINDS.get(device.platform, jax_kind)(device)


def jax_kind(device: jax.Device) -> str:
    """JAX's name of a device's kind."""
    return device.device_kind


def cpu_kind(device: jax.Device) -> str:
    """The architecture of this machine's CPU and a digest of the instruction sets that it has."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} CPU {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


# Platforms on which JAX gives different machines one name.
KINDS: Mapping[str, Callable[[jax.Device], str]] = MappingProxyType({"cpu": cpu_kind})


def host() -> tuple[Target, list[jax.Device]]:
    """This machine's CPU as a target, of which no data sheet is known, and its device."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = jax.devices("cpu")[:1]
    chip = Chip(
        "cpu", "cpu", device_kind(devices[0]), memory, HOST_SHARE, flops=0, bandwidth=0, link_bandwidth=0, topologies={}
    )
    return Target(chip), devices


def without_devices() -> None:
    """Nothing; JAX looks for no accelerator in this process, and compilers for those that are not here keep quiet."""
    jax.config.update("jax_platforms", "cpu")
    for name, value in COMPILER_ENVIRONMENT.items():
        os.putenv(name, value)
