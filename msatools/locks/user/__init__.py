# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks of user space: futexes, and locks on files."""
