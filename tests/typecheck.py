# SPDX-License-Identifier: Apache-2.0
"""The checker of shape and type annotations; an int serves where a float is asked for, as in Python's own numbers."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
