# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks, files and other tasks that tasks wait on, and their owners."""
