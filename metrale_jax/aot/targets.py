# SPDX-License-Identifier: Apache-2.0
"""Machines that steps are compiled for while none of them is attached: so many devices of a chip.

JAX asks the compilers of its GPU and TPU plugins for a topology's devices. No driver is touched. The process must
run with `JAX_PLATFORMS=cpu` in its environment, or JAX would first look for the devices themselves.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from metrale_jax.aot.chips import CHIPS, Chip
from metrale_jax.core.errors import ConfigError

PLUGINS: Mapping[str, str] = MappingProxyType({"cuda": "jax_cuda13_plugin", "tpu": "libtpu"})
COUNTS = (1, 2, 4, 8)
INSTALL = "pip install 'metrale-jax[aot]'"


@dataclass(frozen=True)
class Target:
    """`num_devices` of a chip in one machine."""

    chip: Chip
    num_devices: int = 1

    @property
    def name(self) -> str:
        """`h200` for one device, `v6e-8` for eight."""
        return self.chip.name if self.num_devices == 1 else f"{self.chip.name}-{self.num_devices}"

    @property
    def platform(self) -> str:
        """As `pallas_kernels.dispatch` calls it."""
        return self.chip.platform

    def devices(self) -> Sequence[jax.Device]:
        """Devices to compile for. Raises `ConfigError` if the platform's compiler is not installed."""
        if importlib.util.find_spec(PLUGINS[self.platform]) is None:
            raise ConfigError(
                f"target {self.name!r} needs the {self.platform} compiler, which is not installed; run `{INSTALL}`."
            )
        description = self.chip.description
        topology = next(name for count, name in self.chip.topologies.items() if count >= self.num_devices)
        facts = {"target_config": description, "topology": topology} if description else {}
        try:
            found = topologies.get_topology_desc(platform=self.platform, topology_name=topology, **facts)
        except NotImplementedError as error:
            raise ConfigError(
                f"target {self.name!r}: JAX did not register the {self.platform} compiler ({error}); run with "
                "JAX_PLATFORMS=cpu in the environment."
            ) from error
        return found.devices[: self.num_devices]


def target_for(name: str, others: Sequence[str] = ()) -> Target:
    """The target of that name, in letters of either case. Raises `ConfigError` with the list, and the `others` that its
    caller knows, if it is unknown."""
    chip, dash, count = name.strip().lower().partition("-")
    if chip not in CHIPS or (dash and count not in map(str, COUNTS)):
        sizes = ", ".join(f"-{count}" for count in COUNTS[1:])
        more = "".join(f", or {other}" for other in others)
        raise ConfigError(
            f"target {name!r} is unknown; use one of {sorted(CHIPS)}, with {sizes} after it for so many devices{more}."
        )
    return Target(CHIPS[chip], int(count or 1))
