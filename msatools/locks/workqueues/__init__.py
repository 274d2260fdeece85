# SPDX-License-Identifier: LGPL-2.1-or-later

"""Workqueues: pools of workers, the work items they are on, and those that wait."""
