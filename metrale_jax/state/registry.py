# SPDX-License-Identifier: Apache-2.0
"""Kinds of layer state by the type of their specs: one line each, for the pool and all that plans or moves it.

A kind is held in blocks, as many as a sequence is long, or in one slot a sequence.
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from metrale_jax.state import paged, recurrent

BY_BLOCK: Mapping[type, ModuleType] = MappingProxyType({paged.PagedKvSpec: paged})
BY_SLOT: Mapping[type, ModuleType] = MappingProxyType({recurrent.RecurrentSpec: recurrent})
# The same by the type of their storage.
OF_STORAGE: Mapping[type, ModuleType] = MappingProxyType({paged.PagedKv: paged, recurrent.Recurrent: recurrent})
