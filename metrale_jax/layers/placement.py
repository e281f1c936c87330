# SPDX-License-Identifier: Apache-2.0
"""`Placement`: where a layer runs, and what part of it a device has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Static facts of where a layer runs: its group of the pool, the norm's epsilon, the platform lowered for, and the
    implementation of paged attention.

    `axis` names the mesh axis whose devices share the layer's heads and channels, `norm_axis` the same where one norm
    is over all heads; both are empty where one device has all.
    """

    group: int
    norm_eps: float
    platform: str
    attention: str = "auto"
    axis: str = ""
    norm_axis: str = ""
