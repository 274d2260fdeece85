# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Facts: what a command reports of a dump, and what the guest itself had recorded.

One module a command holds its table of facts; ``test_facts.py`` holds each against
whatever dumps there are.
"""
