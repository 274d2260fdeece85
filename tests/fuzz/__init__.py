# SPDX-License-Identifier: LGPL-2.1-or-later

"""Damaged and hostile dumps: ``make fuzz N=1000 SEED=1``.

Each case changes a dump, runs a command on it, and judges how that ended. A case is
made from its seed and number alone, so that it can be repeated.

- ``dumps``: the dumps that are changed, in each format
- ``container``, ``notes``, ``tables``, ``memory``: what is changed, a module a layer
- ``cases``: the choice of a case
- ``judge``: what a run may do, and what it must not
- ``run``: cases in processes of their own; what failed is kept, and made smaller
"""
