# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Facts: figures that a command reports about a dump and that the guest recorded itself.

A module per command has its table of facts; ``test_facts.py`` compares them on dumps.
"""
